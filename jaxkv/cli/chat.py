"""`jaxkv chat`: talk with a model."""

import dataclasses
import itertools
import json
import sys

from jaxkv.cli.options import Cut, Drafting, Draw, Load, Spread
from jaxkv.cli.statistics import facts, size, summary
from jaxkv.cli.terminal import Meter, note
from jaxkv.errors import BadValue


@dataclasses.dataclass(frozen=True)
class Chat:
    """Talk with a model; the bounded cache is kept over the turns. An empty line or end of input leaves."""

    load: Load = Load()
    cut: Cut = Cut()
    draw: Draw = Draw(max_new_tokens=256)
    drafting: Drafting = Drafting()
    mesh: str | None = None
    """This host's devices share the work: axes such as data=1,model=4, or a name of configs/meshes."""
    system: str | None = None
    """A system message in front."""
    json: bool = False
    """One JSON object per answer."""

    def __call__(self) -> int:
        import jax

        import jaxkv
        from jaxkv.request import check_speculative

        spread = Spread(mesh=self.mesh)
        spread.join()
        chosen, method = self.cut.build(), self.drafting.build()
        mesh = spread.build()
        if jax.process_count() > 1:
            raise BadValue("chat on many hosts, of which only one hears the person: use jaxkv generate there")
        check_speculative(mesh, method)
        params = self.load.build(mesh)
        if not getattr(params.tokenizer, "chat_template", None):
            raise BadValue(f"model {self.load.model!r} has no chat template: use jaxkv generate")
        messages = [{"role": "system", "content": self.system}] if self.system else []
        cache = None
        note(f"{self.load.model} under {size(chosen)}; an empty line ends")
        while line := _ask():
            said = [*messages, {"role": "user", "content": line}]
            try:
                with Meter(self.json) as meter:  # until the first words come
                    pieces = jaxkv.stream(
                        params, said, policy=None if cache is not None else chosen, cache=cache, speculative=method,
                        scan_layers=True, progress=meter.update, **self.draw.options(),
                    )  # fmt: skip
                    coming = iter(pieces)
                    first = next(coming, "")
            except BadValue as error:
                if not sys.stdin.isatty() or cache is None:
                    raise
                print(f"jaxkv: {error}; the conversation goes on without this line", file=sys.stderr)
                continue
            messages = said
            for piece in itertools.chain((first,), coming):
                if not self.json:
                    print(piece, end="", flush=True)
            out = pieces.generation
            cache = out.cache
            messages.append({"role": "assistant", "content": out.text})
            if self.json:
                print(json.dumps({"text": out.text, "stats": facts(out.stats)}), flush=True)
            else:
                print()
                note(summary(chosen, out.stats))
        return 0


def _ask() -> str:
    """One line from the person; empty at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise BadValue(f"standard input is not {error.encoding} ({error.reason}): pipe text in") from None

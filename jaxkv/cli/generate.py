"""`jaxkv generate`: continue a prompt."""

import dataclasses
import json
import sys

from tyro.conf import Positional

from jaxkv.cli.options import Cut, Drafting, Draw, Load, Spread
from jaxkv.cli.statistics import facts, summary
from jaxkv.cli.terminal import Meter, note
from jaxkv.errors import BadValue


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt under a KV budget."""

    prompt: Positional[str]
    """The text; "-" reads it from standard input."""
    load: Load = Load()
    cut: Cut = Cut()
    draw: Draw = Draw()
    drafting: Drafting = Drafting()
    spread: Spread = Spread()
    chat: bool = False
    """Wrap the prompt in the model's chat template."""
    json: bool = False
    """One JSON object with text, token ids and statistics."""

    def __call__(self) -> int:
        import jaxkv
        from jaxkv.request import check_speculative
        from jaxkv.sharding.hosts import speaks

        self.spread.join()
        chosen, method = self.cut.build(), self.drafting.build()
        text = _piped() if self.prompt == "-" else self.prompt
        mesh = self.spread.build()
        check_speculative(mesh, method)
        params = self.load.build(mesh)
        prompt = [{"role": "user", "content": text}] if self.chat else text
        with Meter(self.json or not speaks()) as meter:
            out = jaxkv.generate(
                params, prompt, policy=chosen, speculative=method, scan_layers=True, progress=meter.update,
                **self.draw.options(),
            )  # fmt: skip
        if not speaks():
            return 0
        if self.json:
            ids = out.tokens[0, : out.lengths[0]].tolist()
            print(json.dumps({"text": out.text, "tokens": ids, "stats": facts(out.stats)}))
        else:
            print(out.text)
            note(summary(chosen, out.stats))
        return 0


def _piped() -> str:
    """The text on standard input. Raises `BadValue` where it is none."""
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise BadValue(f"standard input is not {error.encoding} ({error.reason}): pipe text in") from None

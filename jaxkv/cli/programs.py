"""`jaxkv warmup` and `jaxkv cache`: programs that are compiled ahead, and kept."""

import dataclasses
import json

from tyro.conf import Positional

from jaxkv.cli.options import Cut, Drafting, Draw, Load
from jaxkv.cli.terminal import note
from jaxkv.errors import BadValue


def keep_programs() -> None:
    """Compiled programs stay, unless the folder cannot be written: then everything works but the next start is slow."""
    from jaxkv import programs

    try:
        programs.keep_programs()
    except BadValue as error:
        note(f"compiled programs are not kept: {error}")


@dataclasses.dataclass(frozen=True)
class Warmup:
    """Compile ahead what `generate` and `chat` will need; the programs are kept for later."""

    lengths: Positional[tuple[int, ...]] = (64, 256, 1024)
    """Prompt lengths in tokens; near ones share programs."""
    load: Load = Load()
    batch: int = 1
    cut: Cut = Cut()
    draw: Draw = Draw()
    drafting: Drafting = Drafting()

    def __call__(self) -> int:
        import jaxkv

        chosen, method = self.cut.build(), self.drafting.build()
        params = self.load.build()
        options = {"policy": chosen, "speculative": method, "scan_layers": True, **self.draw.options()}
        for length in self.lengths:
            (seconds,) = jaxkv.warmup(params, (length,), batch=self.batch, **options).values()
            print(f"{length} tokens: {seconds:.1f} s", flush=True)
        return 0


@dataclasses.dataclass(frozen=True)
class Cache:
    """The compiled programs that are kept in jaxkv's cache folder."""

    clear: bool = False
    """Remove them."""
    json: bool = False

    def __call__(self) -> int:
        from jaxkv import programs

        if self.clear:
            programs.forget_programs()
        found = programs.kept()
        if self.json:
            print(json.dumps([{**dataclasses.asdict(each), "folder": str(each.folder)} for each in found]))
            return 0
        print(f"at most {programs.LIMIT / 2**20:.0f} MiB of compiled programs stay at a start, for each jaxlib and CPU")
        for each in found:
            print(f"{each.folder}  {each.programs} programs, {each.bytes / 2**20:.1f} MiB")
        if not found:
            print(f"none in {programs.own_folder()}")
        return 0

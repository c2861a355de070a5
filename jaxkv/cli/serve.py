"""`jaxkv serve`: answer many requests over HTTP."""

import dataclasses
import os
from pathlib import Path

from jaxkv.cli.options import Cut, Drafting, Load, Spread
from jaxkv.cli.statistics import size
from jaxkv.cli.terminal import tell
from jaxkv.errors import BadValue

SERVED_BLOCK = 256  # tokens of a prompt between two steps of the rows that run


@dataclasses.dataclass(frozen=True)
class Serve:
    """Answer requests over HTTP (the OpenAI API, and a page at /), many side by side; needs jaxkv[serve].

    On many hosts each of them runs the same command, and process 0 answers.
    """

    load: Load = Load()
    cut: Cut = Cut()
    drafting: Drafting = Drafting()
    spread: Spread = Spread()
    rows: int = 8
    """Requests that run at a time."""
    longest: int | None = None
    """Prompt tokens that rows have slots for, where the policy keeps them all while decoding: 2048, or what the model's
    context leaves beside the new ones."""
    max_new_tokens: int = 512
    """New tokens, likewise."""
    block: int | None = None
    """Prompt tokens run at a time, between steps of the rows that run: 256 where the policy has no block of its own."""
    queue: int = 256
    """Requests that may wait."""
    prefix: tuple[str, ...] = ()
    """Texts to branch from, as name=file."""
    host: str = "127.0.0.1"
    """0.0.0.0 answers other machines as well: give a token then."""
    host_names: tuple[str, ...] = ()
    """Names to answer to besides the loopback's, such as a proxy's; with another --host any, unless some are given."""
    port: int = 8000
    token: str | None = None
    """Who asks must send it as bearer token; by default what $JAXKV_TOKEN says, if anything."""
    name: str | None = None
    """What requests call the model (its own name by default)."""
    body: int = 2**20
    """The most bytes of a request."""
    seconds: float = 600.0
    """The most seconds of a request, its time in the queue among them."""
    grace: float = 60.0
    """Seconds to finish what runs when told to stop."""

    def __call__(self) -> int:
        import importlib.util

        if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
            raise BadValue("jaxkv serve needs the libraries of an extra: pip install 'jaxkv[serve]'")
        import jaxkv
        from jaxkv.request import check_speculative
        from jaxkv.serving import Engine
        from jaxkv.serving.asked import check_mesh
        from jaxkv.serving.http import Limits
        from jaxkv.serving.serve import check, check_free, serve

        token = os.environ.get("JAXKV_TOKEN") if self.token is None else self.token
        check(port=self.port, token=token, grace=self.grace)
        if not self.spread.process_id:
            check_free(self.host, self.port)
        limits = Limits(body=self.body, seconds=self.seconds)
        self.spread.join()
        chosen, method = self.cut.build(), self.drafting.build()
        own = self.block is not None
        chosen = dataclasses.replace(chosen, block=self.block) if own else chosen.in_blocks(SERVED_BLOCK)
        prefixes = [(name, Path(file)) for name, _, file in (each.partition("=") for each in self.prefix)]
        for each, (name, file) in zip(self.prefix, prefixes, strict=True):
            if not name or not file.is_file():
                raise BadValue(f"prefix {each!r}: expected name=file, of a text file that is there")
        mesh = self.spread.build()
        check_mesh(mesh)
        check_speculative(mesh, method)
        params = self.load.build(mesh)
        engine = Engine(
            params, chosen, rows=self.rows, longest=self.longest, max_new_tokens=self.max_new_tokens,
            queue=self.queue, speculative=method, scan_layers=True,
        )  # fmt: skip
        for name, file in prefixes:
            engine.store(name, jaxkv.prefill(params, file.read_text(encoding="utf-8-sig"), policy=chosen))
        about = f"{self.load.model} under {size(chosen)}, {self.rows} rows"
        serve(
            engine, self.name or self.load.model, host=self.host, host_names=self.host_names, port=self.port,
            token=token, grace=self.grace, listens=lambda address: tell(f"{about}: {address}"),
            limits=dataclasses.replace(limits, max_tokens=min(limits.max_tokens, self.max_new_tokens)),
        )  # fmt: skip
        return 0

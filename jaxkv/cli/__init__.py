"""`jaxkv` on the command line: generate, chat, serve, warmup, policies, info, calibrate, eval, report, cache."""

from jaxkv.cli.entry import main

__all__ = ["main"]

"""Folders of the user's that jaxkv writes to."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where joined models and compiled programs are kept: `$JAXKV_CACHE`, else `~/.cache/jaxkv`."""
    return Path(os.environ.get("JAXKV_CACHE") or Path.home() / ".cache" / "jaxkv")

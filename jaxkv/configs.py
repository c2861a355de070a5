"""The TOML files that ship with jaxkv: models, policies."""

from pathlib import Path


def config_files(kind: str) -> dict[str, Path]:
    """The files of configs/<kind>/ by name, from the installed package or from a source tree."""
    here = Path(__file__).parent
    folder = next(path for path in (here / "configs", here.parent / "configs") if path.is_dir())
    return {path.stem: path for path in sorted((folder / kind).glob("*.toml"))}

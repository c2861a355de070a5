"""Where the TOML files of models and policies lie: inside the installed package, else beside it in the repository."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


def config_files(kind: str) -> dict[str, Traversable]:
    """The TOML files of one kind ("models", "policies", "meshes") by name, without the suffix."""
    shipped = files("jaxkv") / "configs" / kind
    folder: Traversable = shipped if shipped.is_dir() else Path(__file__).parent.parent / "configs" / kind
    if not folder.is_dir():
        return {}
    found = (file for file in folder.iterdir() if file.name.endswith(".toml"))
    return {file.name.removesuffix(".toml"): file for file in sorted(found, key=lambda file: file.name)}

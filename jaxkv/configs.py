"""Where the TOML files of models and policies lie: inside the installed package, else beside it in the repository."""

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from jaxkv.errors import BadValue


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `BadValue` naming it for what cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadValue(f"{path} cannot be read ({error.strerror or error}): expected a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadValue(f"{path}: not TOML ({error})") from None
    except RecursionError:
        raise BadValue(f"{path}: nested too deep: expected a few tables") from None


def config_files(kind: str) -> dict[str, Traversable]:
    """The TOML files of one kind ("models", "policies", "meshes") by name, without the suffix."""
    shipped = files("jaxkv") / "configs" / kind
    folder: Traversable = shipped if shipped.is_dir() else Path(__file__).parent.parent / "configs" / kind
    if not folder.is_dir():
        return {}
    found = (file for file in folder.iterdir() if file.name.endswith(".toml"))
    return {file.name.removesuffix(".toml"): file for file in sorted(found, key=lambda file: file.name)}

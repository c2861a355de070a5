"""Reading GGUF: metadata, and tensors that are dequantised when they are read.

The header is parsed here, and not by `gguf.GGUFReader`, which makes an array object of every vocabulary entry (10 s for
a vocabulary of 262144, here a tenth of a second) and tells nothing of truncated files; block formats are `gguf`'s.
"""

import dataclasses
import functools
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.checks import fits, shown
from jaxkv.errors import BadWeights, MissingModel
from jaxkv.models.linear import Form
from jaxkv.weights import gguf_blocks

# value types of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEEPEST = 8  # arrays in arrays: no file that we know has any
VERSIONS = (2, 3)
PART = re.compile(r"(.+)-(\d{5})-of-\d{5}\.gguf")
STRETCH = 2**18  # values dequantised in one call: they and what they are made of stay in a core's cache


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` as `[out, in]`, and where its blocks lie in the file."""

    path: Path
    shape: tuple[int, ...]
    kind: int
    stored: tuple[int, ...]
    offset: int

    def read(self, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """The values, float32; only the rows asked for are read and dequantised."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.kind)
        item = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
        data = np.memmap(self.path, dtype=item, mode="r", offset=self.offset, shape=self.stored)
        if len(self.shape) == 1:
            return gguf.dequantize(data, kind).reshape(self.shape).astype(np.float32, copy=False)[rows]
        stored = np.asarray(data)[rows]
        values = np.empty((len(stored), self.shape[1]), np.float32)
        some = max(1, STRETCH // self.shape[1])
        for start in range(0, len(stored), some):
            # as one row of blocks: gguf takes 16 rows at a time, which for a row of a matrix is little work a call
            part = stored[start : start + some]
            values[start : start + some] = gguf.dequantize(part.reshape(1, -1), kind).reshape(len(part), -1)
        return values[:, columns]

    @property
    def form(self) -> Form | None:
        """The blocks that the tensor is stored in; None for floats, vectors and formats that `Blocks` does not have."""
        known = gguf_blocks.KINDS.get(_name(self.kind))
        return known[0] if known is not None and len(self.shape) == 2 else None

    def blocks(self, form: Form, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The arrays of `Blocks` in this form, each `[out, ...]`, of the rows asked for."""
        data = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.offset, shape=self.stored)
        return gguf_blocks.arrays(_name(self.kind), np.asarray(data)[rows], form)


@functools.cache
def _readable(kind: int) -> bool:
    """Whether `gguf` makes numbers of such blocks."""
    import gguf

    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    item = {"F32": np.float32, "F16": np.float16}.get(_name(kind), np.uint8)
    try:
        gguf.dequantize(np.zeros(block_bytes, np.uint8).view(item), gguf.GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def _name(kind: int) -> str:
    import gguf

    return gguf.GGMLQuantizationType(kind).name


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Metadata by key, and tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The metadata and the tensors of a GGUF file, none of them read yet; of the first part of a file in several parts
    those of all.

    Raises `BadWeights` for a file that is no GGUF, of another version, of an unknown block format, or truncated, and
    for another part than the first; `MissingModel` where one is not there.
    """
    first = _read(path)
    count = first.fields.get("split.count", 1)
    if not fits(count, int) or count < 2:
        return first
    part = PART.fullmatch(path.name)
    if part is None or int(part[2]) != 1:
        raise BadWeights(
            f"{path} is one of {count} parts: load the first, NAME-00001-of-{count:05}.gguf, beside the others"
        )
    others = [path.with_name(f"{part[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    lost = [str(other) for other in others if not other.is_file()]
    if lost:
        raise MissingModel(f"{path} is the first of {count} parts, and {', '.join(lost)} is not there: get all of them")
    every = [first, *map(_read, others)]
    return GgufFile(first.fields, {name: tensor for each in every for name, tensor in each.tensors.items()})


def _read(path: Path) -> GgufFile:
    """One file."""
    import gguf

    size = path.stat().st_size
    if size < 24:
        raise BadWeights(f"{path} has {size} bytes: expected a GGUF file; it is truncated, get it again")
    header = _Header(path, np.memmap(path, dtype=np.uint8, mode="r"))
    if bytes(header.take(4)) != b"GGUF":
        raise BadWeights(f"{path} does not begin with 'GGUF': expected a GGUF file")
    version = header.number("I")
    if version not in VERSIONS:
        raise BadWeights(f"{path} is GGUF version {version}: expected {' or '.join(map(str, VERSIONS))}, little-endian")
    tensor_count, field_count = header.number("Q"), header.number("Q")
    fields = {}
    for _ in range(field_count):
        key = header.string()
        fields[key] = header.value(header.number("I"))
    infos = []
    for _ in range(tensor_count):
        name, dims = header.string(), header.number("I")
        shape = tuple(reversed([header.number("Q") for _ in range(dims)]))  # the fastest dimension comes first there
        infos.append((name, shape, header.number("I"), header.number("Q")))
    alignment = fields.get("general.alignment", 32)
    if not fits(alignment, int) or alignment < 1:
        raise BadWeights(f"{path}: general.alignment is {shown(alignment)}: the header is damaged, get the file again")
    start = -(-header.at // alignment) * alignment

    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in gguf.GGMLQuantizationType._value2member_map_:
            raise BadWeights(f"{path}: tensor {name} has block format {kind}, which gguf {_version()} does not know")
        if not _readable(kind):
            raise BadWeights(
                f"{path}: tensor {name} has block format {_name(kind)}, which gguf {_version()} cannot read: get the "
                "model in another format, such as Q8_0 or F16"
            )
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or shape[-1] % per_block:
            raise BadWeights(f"{path}: tensor {name} of shape {list(shape)} does not fill blocks of {per_block}")
        name_of_kind = gguf.GGMLQuantizationType(kind).name
        width = shape[-1] // per_block * block_bytes if name_of_kind not in ("F32", "F16") else shape[-1]
        needed = math.prod(shape) // per_block * block_bytes
        if start + offset + needed > size:
            raise BadWeights(
                f"{path} is truncated: tensor {name} ends at byte {start + offset + needed}, and the file has {size}; "
                "get it again"
            )
        tensors[name] = GgufTensor(path, shape, kind, (*shape[:-1], width), start + offset)
    return GgufFile(fields, tensors)


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


class _Header:
    """A cursor over the file's first part."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.data, self.at = path, memoryview(data), 0

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise BadWeights(
                f"{self.path} is truncated: its header goes on past byte {len(self.data)}, where the file ends; "
                "get it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > DEEPEST:
            raise BadWeights(f"{self.path}: metadata value of type {kind}: the header is damaged, get the file again")
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS:
            code = "<" + SCALARS[kind]
            return np.frombuffer(self.take(count * struct.calcsize(code)), code).tolist()
        return [self.value(kind, depth + 1) for _ in range(count)]

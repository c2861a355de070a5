"""GGUF's blocks as `Blocks` hold a matrix: the file's own codes, with a scale (and an offset) for 32 or 16 inputs.

What the block formats are: https://github.com/ggml-org/ggml (ggml-common.h), and the `gguf` package's `quants`.
"""

from collections.abc import Callable, Iterable

import numpy as np

from jaxkv.models.linear import Form
from pallas_kernels.block_product.reference import GROUP

Arrays = dict[str, np.ndarray]  # "codes", "scale" and perhaps "offset", each [blocks, ...]
SUPER = 256  # inputs of a block whose scales have two levels


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The 4-bit codes of `[..., 16]` bytes: 16 low ones, then 16 high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _halves(data: np.ndarray, *at: int) -> list[np.ndarray]:
    """The float16 numbers `[blocks, 1]` that begin at these bytes of each block."""
    return [np.ascontiguousarray(data[:, start : start + 2]).view(np.float16) for start in at]


def _fifth_bits(data: np.ndarray, at: int) -> np.ndarray:
    """The 32 fifth bits `[blocks, 32]` that begin at this byte, each as 0 or 16."""
    return np.unpackbits(data[:, at : at + 4], axis=-1, bitorder="little") << 4


def _q4_0(data: np.ndarray) -> Arrays:
    (scale,) = _halves(data, 0)
    return {"codes": data[:, 2:], "scale": scale, "offset": scale * np.float16(-8)}


def _q4_1(data: np.ndarray) -> Arrays:
    scale, offset = _halves(data, 0, 2)
    return {"codes": data[:, 4:], "scale": scale, "offset": offset}


def _q5_0(data: np.ndarray) -> Arrays:
    (scale,) = _halves(data, 0)
    return {"codes": (_nibbles(data[:, 6:]) | _fifth_bits(data, 2)).view(np.int8) - np.int8(16), "scale": scale}


def _q5_1(data: np.ndarray) -> Arrays:
    scale, offset = _halves(data, 0, 2)
    return {"codes": (_nibbles(data[:, 8:]) | _fifth_bits(data, 4)).view(np.int8), "scale": scale, "offset": offset}


def _q8_0(data: np.ndarray) -> Arrays:
    (scale,) = _halves(data, 0)
    return {"codes": data[:, 2:].view(np.int8), "scale": scale}


def _two_levels(data: np.ndarray) -> Arrays:
    """The scales and offsets `[blocks, 8]` of Q4_K and Q5_K: products of a float16 and 6 bits, rounded to float16."""
    from gguf.quants import Q4_K

    scale, least = (each.astype(np.float32) for each in _halves(data, 0, 2))
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(data[:, 4:16]))
    return {"scale": (scale * scales).astype(np.float16), "offset": (-least * minima).astype(np.float16)}


def _in_turns(data: np.ndarray) -> np.ndarray:
    """The 4-bit codes `[blocks, 256]` of 128 bytes: of every 32 bytes 32 low ones, then 32 high ones."""
    parts = data.reshape(len(data), 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(data), SUPER)


def _q4_k(data: np.ndarray) -> Arrays:
    codes = _in_turns(data[:, 16:]).reshape(len(data), -1, 2, GROUP // 2)
    return {"codes": (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(data), -1), **_two_levels(data)}


def _q5_k(data: np.ndarray) -> Arrays:
    fifth = np.unpackbits(data[:, 16:48, None], axis=2, bitorder="little")  # of every 32 bytes, a bit for each turn
    codes = _in_turns(data[:, 48:]) | np.swapaxes(fifth, 1, 2).reshape(len(data), SUPER) << 4
    return {"codes": codes.view(np.int8), **_two_levels(data)}


def _q6_k(data: np.ndarray) -> Arrays:
    low, high = data[:, :128].reshape(-1, 2, 1, 64), data[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, SUPER)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, SUPER)
    (whole,) = _halves(data, 208)
    scale = whole.astype(np.float32) * np.ascontiguousarray(data[:, 192:208]).view(np.int8)
    return {"codes": (low | high << 4).view(np.int8) - np.int8(32), "scale": scale.astype(np.float16)}


KINDS: dict[str, tuple[Form, Callable[[np.ndarray], Arrays]]] = {
    "Q4_0": (Form(4, 32, True), _q4_0),
    "Q4_1": (Form(4, 32, True), _q4_1),
    "Q5_0": (Form(8, 32, False), _q5_0),
    "Q5_1": (Form(8, 32, True), _q5_1),
    "Q8_0": (Form(8, 32, False), _q8_0),
    "Q4_K": (Form(4, 32, True), _q4_k),
    "Q5_K": (Form(8, 32, True), _q5_k),
    "Q6_K": (Form(8, 16, False), _q6_k),
}


def common(forms: Iterable[Form]) -> Form:
    """The smallest form that holds matrices of all these."""
    forms = list(forms)
    groups = [form.group for form in forms if form.group is not None]
    return Form(max(form.bits for form in forms), min(groups), any(form.offset for form in forms))


def arrays(kind: str, data: np.ndarray, form: Form) -> Arrays:
    """The blocks of a matrix, uint8 `[out, bytes]`, as the arrays of `Blocks` in this form, each `[out, ...]`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    own, made = KINDS[kind]
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    found = made(data.reshape(-1, size))
    if form.bits > own.bits:
        found["codes"] = _nibbles(found["codes"].reshape(-1, GROUP // 2)).view(np.int8)
    if form.group != own.group:
        assert own.group is not None and form.group is not None
        for name in found.keys() - {"codes"}:
            found[name] = np.repeat(found[name].reshape(-1, 1), own.group // form.group, axis=1)
    if form.offset and not own.offset:
        found["offset"] = np.zeros_like(found["scale"])
    return {name: np.ascontiguousarray(array).reshape(len(data), -1) for name, array in found.items()}

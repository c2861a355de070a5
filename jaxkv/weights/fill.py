"""Tensors of a file -> the model's weights: names resolved, shapes and values checked, parts joined, laid out."""

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.errors import BadValue, BadWeights
from jaxkv.models import ModelConfig, abstract_weights, inputs_axis
from jaxkv.models.joined import Segment, order
from jaxkv.models.linear import FORMS, Blocks, Form, as_held, in_blocks, packed, packed_table, quantised
from jaxkv.weights.gguf_blocks import common
from jaxkv.weights.tables import OUTSIDE_LAYERS, Table, shapes, wanted

SHOWN = 12  # problems listed in one error
AT_ONCE = 4  # weights that are read side by side
ALL = slice(None)
STORED = "file"  # weights= for blocks as a GGUF file holds them


@runtime_checkable
class Tensor(Protocol):
    """A tensor in a file: its shape in files' order, and how to read it or a part of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, rows: slice = ALL, columns: slice = ALL) -> np.ndarray: ...


class StoredTensor(Tensor, Protocol):
    """A tensor of a file whose matrices may lie in blocks (None: floats)."""

    @property
    def form(self) -> Form | None: ...

    def blocks(self, form: Form, rows: slice = ALL) -> dict[str, np.ndarray]: ...


Key = tuple[str, int | None]
Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]
Place = Callable[[str, tuple[int, ...], Read], Any]


def resolve(tensors: Mapping[str, Tensor], table: Table, config: ModelConfig, where: str) -> dict[Key, str]:
    """The name of every target's tensor. Raises `BadWeights` naming all missing, unexpected and misshapen tensors."""
    expected, needed = shapes(config), set(wanted(config))
    found: dict[Key, str] = {}
    keys = {name: table.find(name) for name in tensors}
    layers = max((key[1] + 1 for key in keys.values() if key is not None and key[1] is not None), default=0)
    counts = [f"the weights have {layers} layers"] if 0 < layers != config.num_layers else []
    problems = []
    for name, tensor in tensors.items():
        key = keys[name]
        if key is None or key not in needed:
            tied = key is not None and key[0] == "head" and config.tie_embeddings
            if not tied and not table.ignores(name):
                problems.append(f"unexpected {name}")
            continue
        found[key] = name
        if tuple(tensor.shape) != expected[key[0]]:
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[key[0]])}")
    missing = [f"missing {table.name_of(*key)}" for key in wanted(config) if key not in found]
    if missing or problems:
        listed = (counts + missing + problems)[:SHOWN]
        more = len(counts) + len(missing) + len(problems) - len(listed)
        raise BadWeights(
            f"{where} does not hold a {config.family} model of {config.num_layers} layers: {'; '.join(listed)}"
            + (f"; and {more} more" if more > 0 else "")
            + ". Get the file that belongs to this config."
        )
    return found


def fill(
    tensors: Mapping[str, Tensor],
    table: Table,
    config: ModelConfig,
    *,
    dtype: Any,
    panels: bool,
    place: Place,
    where: str,
    weights: str | None = None,
) -> Any:
    """The model's weights (an `nnx.State`), a few at a time, so that little more than the result is ever in memory.

    Matrices and biases are cast to `dtype`, norms stay float32; with `weights` matrices become blocks of 8 or 4 bits,
    or stay in a GGUF file's own (`STORED`), of one form in all layers.
    `place(path, shape, read)` makes the array of a path such as "layers/3/qkv" on its devices (of blocks:
    "layers/3/qkv#codes"); `read(index)` gives the part of it that a device needs, and reads no more of the file. Raises
    `BadWeights` as `resolve` does, and for a tensor that holds NaN or infinity; `BadValue` for one beyond float16.
    """
    names = resolve(tensors, table, config, where)
    forms = _forms(cast(Any, tensors), names) if weights == STORED else {}

    def part(target: str, layer: int | None, rows: slice, columns: slice) -> np.ndarray:
        name, change = names[target, layer], table.changes.get(target)
        value = tensors[name].read(rows, columns) if change is None else tensors[name].read()
        if not np.isfinite(value).all():
            raise _damaged(where, name)
        return value if change is None else change(config, value)[_at(value, rows, columns)]

    def filled(path: tuple, leaf: Any) -> tuple[tuple, Any]:
        target, layer = str(path[-1]), None if path[0] in OUTSIDE_LAYERS else int(str(path[1]))
        value, name = leaf.get_value(), "/".join(map(str, path))

        def held(target: str, rows: slice, columns: slice) -> np.ndarray:
            """Some of a tensor, in the dtype that it gets."""
            read = part(target, layer, rows, columns)
            with np.errstate(over="ignore"):
                cut = read.astype(value.dtype, copy=False)
            if value.dtype == np.float16 and not np.isfinite(cut).all():
                raise BadValue(
                    f"{where}: tensor {names[target, layer]} holds {np.abs(read).max():g}, and float16 ends at 65504: "
                    "load it with dtype='bfloat16' or 'float32'"
                )
            return cut

        def outputs(rows: slice, columns: slice = ALL) -> np.ndarray:
            """Some of the matrix `[out, in]`, or of the vector, as files hold it."""
            joined = order(target, config)
            if not joined:
                return held(target, rows, columns)
            return _joined(joined, rows, lambda name, rows: held(f"{target}#{name}", rows, columns))

        def stored(name: str, rows: slice, form: Form) -> dict[str, np.ndarray]:
            """Some rows of a part in the file's own blocks; a change of a matrix reorders its outputs."""
            tensor, change = cast(StoredTensor, tensors[names[name, layer]]), table.changes.get(name)
            if change is None:
                found = tensor.blocks(form, rows)
            else:
                found = {each: change(config, array)[rows] for each, array in tensor.blocks(form).items()}
            if not all(np.isfinite(array).all() for each, array in found.items() if each != "codes"):
                raise _damaged(where, names[name, layer])
            return as_held(found)

        laid = functools.partial(_laid_out, target, tied=config.tie_embeddings)
        form = forms.get(target) if weights == STORED else FORMS.get(weights or "")
        if form is None or value.ndim == 1:
            return path, leaf.replace(place(name, value.shape, lambda index: laid(value.shape, index, outputs)))

        @functools.cache
        def arrays(start: int | None, stop: int | None) -> dict[str, np.ndarray]:
            if weights != STORED:
                assert weights is not None
                return as_held(quantised(outputs(slice(start, stop)), weights))
            joined = order(target, config)
            if not joined:
                return stored(target, slice(start, stop), form)
            once = functools.cache(lambda part, low, high: stored(f"{target}#{part}", slice(low, high), form))
            return {
                each: _joined(joined, slice(start, stop), lambda part, r, each=each: once(part, r.start, r.stop)[each])
                for each in ("codes", "scale", "offset")[: 3 if form.offset else 2]
            }

        def in_place(array: str, shape: tuple[int, ...]) -> Any:
            some = lambda rows, columns=ALL: arrays(rows.start, rows.stop)[array][:, columns]  # noqa: E731
            return place(f"{name}#{array}", shape, lambda index: laid(shape, index, some))

        blocks = in_blocks(value, form, inputs_axis(path, value))
        placed = {array: in_place(array, each.shape) for array, each in blocks.arrays.items()}
        return path, leaf.replace(Blocks.placed(placed, value.dtype))

    leaves = [*nnx.to_flat_state(abstract_weights(config, dtype, panels=panels))]
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:  # NumPy works outside Python's lock
        return nnx.from_flat_state(list(pool.map(filled, *zip(*leaves, strict=True))))


def _damaged(where: str, name: str) -> BadWeights:
    return BadWeights(f"{where}: tensor {name} holds NaN or infinity: the file is damaged, get it again")


def _forms(tensors: Mapping[str, StoredTensor], names: Mapping[Key, str]) -> dict[str, Form]:
    """The form of each target whose tensors are all in blocks: one that all layers and joined parts fit in."""
    found: dict[str, list[Form | None]] = {}
    for (target, _), name in names.items():
        found.setdefault(target.partition("#")[0], []).append(tensors[name].form)
    whole = {target: [form for form in forms if form is not None] for target, forms in found.items()}
    return {target: common(forms) for target, forms in whole.items() if len(forms) == len(found[target])}


def _at(value: np.ndarray, rows: slice, columns: slice) -> Index:
    return (rows, columns)[: value.ndim]


def _joined(segments: list[Segment], wanted: slice, read: Callable[[str, slice], np.ndarray]) -> np.ndarray:
    """The `wanted` outputs of parts joined in the order of `segments`; each part is read once, as far as needed."""
    total = sum(stop - start for _, start, stop in segments)
    first, last, _ = wanted.indices(total)
    pieces, at = [], 0
    for name, start, stop in segments:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            pieces.append((name, start + low, start + high))
        at += stop - start
    ranges = {
        name: (
            min(low for part, low, _ in pieces if part == name),
            max(high for part, _, high in pieces if part == name),
        )
        for name, _, _ in pieces
    }
    held = {name: read(name, slice(low, high)) for name, (low, high) in ranges.items()}
    return np.concatenate([held[name][low - ranges[name][0] : high - ranges[name][0]] for name, low, high in pieces])


def _laid_out(
    target: str, shape: tuple[int, ...], index: Index, outputs: Callable[..., np.ndarray], *, tied: bool
) -> np.ndarray:
    """The part of the stored form that `index` asks for, from `outputs(rows, columns)` in files' order."""
    if len(shape) == 1:
        return outputs(index[0])
    if len(shape) == 3:  # panels are for one device, which wants all
        value = outputs(ALL)
        return (packed_table(value, tied) if target == "embed" else packed(value, True))[index]
    if target == "embed":
        return np.ascontiguousarray(outputs(index[0], index[1]))
    return packed(outputs(index[1], index[0]), False)


def check_dtype(dtype: Any) -> Any:
    """The dtype as jax knows it. Raises `BadValue` for any but float32, bfloat16 and float16."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise BadValue(f"dtype {dtype!r}: expected float32, bfloat16 or float16")
    return found

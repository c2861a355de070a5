"""A store as plain words and a list of arrays, so that it can be written down and made again."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv.errors import BadCheckpoint
from jaxkv.store.balance import Balance
from jaxkv.store.blocks import BlockCode
from jaxkv.store.by_channel import Ranges
from jaxkv.store.codecs import KINDS, Codecs
from jaxkv.store.entries import Entries
from jaxkv.store.fit import Fit
from jaxkv.store.floats import FloatCode
from jaxkv.store.gear import Missed, Own
from jaxkv.store.higgs import HiggsCode
from jaxkv.store.integers import IntCode
from jaxkv.store.line import Place
from jaxkv.store.looks import Looks
from jaxkv.store.outliers import OutlierCode
from jaxkv.store.pages import Pages
from jaxkv.store.pairs import PairCode, PairHalf
from jaxkv.store.pool import Pool
from jaxkv.store.predicted import Link
from jaxkv.store.residue import Residue
from jaxkv.store.sketch import Sketch
from jaxkv.store.slots import Slots
from jaxkv.store.sparse import SparseCode
from jaxkv.store.summary import Summary
from jaxkv.store.threshold import Threshold
from jaxkv.store.tier import Tier
from jaxkv.store.window import Window

KNOWN: dict[str, type] = {
    each.__name__: each
    for each in (
        *(Slots, Pool, Place, Entries, Summary, Residue, Sketch, Looks, Tier, Balance, Threshold, Pages, Window, Fit),
        *(
            Codecs,
            *KINDS.values(),
            IntCode,
            BlockCode,
            Ranges,
            FloatCode,
            HiggsCode,
            OutlierCode,
            SparseCode,
            Own,
            Missed,
        ),
        *(PairHalf, PairCode, Link),
    )
}


def register_state(cls: type) -> type:
    """Makes a frozen dataclass known, whose objects lie beside the slots of a saved store; usable as a decorator."""
    KNOWN[cls.__name__] = cls
    return cls


def described(store: Any) -> dict[str, Any]:
    """What a store consists of, as JSON has it: an array is its shape, its dtype and what its dimensions count."""
    dims: dict[int, tuple[str | None, ...]] = {}

    def seen(leaf: Any, *names: str | None) -> Any:
        dims[id(leaf)] = names
        return leaf

    store.each(seen)
    return _described(store, dims)


def _described(x: Any, dims: dict[int, tuple[str | None, ...]]) -> dict[str, Any]:
    if dataclasses.is_dataclass(x):
        fields = {field.name: _described(getattr(x, field.name), dims) for field in dataclasses.fields(x)}
        return {"is": type(x).__name__, "fields": fields}
    if isinstance(x, dict | tuple):
        fields = {name: _described(each, dims) for name, each in _named(x).items()}
        return {"is": type(x).__name__, "fields": fields}
    if isinstance(x, jax.Array | np.ndarray):
        return {"is": "array", "shape": list(x.shape), "dtype": str(x.dtype), "dims": list(dims[id(x)])}
    return {"is": "value", "value": x}


def _named(x: dict | tuple) -> dict[str, Any]:
    """The members by name; of a tuple by their number, so that names sort as they stand."""
    return x if isinstance(x, dict) else {f"{number:04}": each for number, each in enumerate(x)}


def arrays_of(x: Any) -> list[Any]:
    """The arrays of a store, its fields by name."""
    if dataclasses.is_dataclass(x):
        x = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    if isinstance(x, dict | tuple):
        return [leaf for _, each in sorted(_named(x).items()) for leaf in arrays_of(each)]
    return [x] if isinstance(x, jax.Array | np.ndarray) else []


def arrays_in(fact: dict[str, Any]) -> list[dict[str, Any]]:
    """The arrays of a description, in the order of `arrays_of`."""
    if fact["is"] == "array":
        return [fact]
    return [leaf for name in sorted(fact.get("fields", {})) for leaf in arrays_in(fact["fields"][name])]


def rebuilt(fact: dict[str, Any], arrays: list[Any]) -> Any:
    """The store of a description and its arrays. Raises `BadCheckpoint` for what is not known here."""
    left = iter(arrays)

    def build(fact: dict[str, Any]) -> Any:
        kind = fact["is"]
        if kind == "array":
            return next(left)
        if kind == "value":
            return fact["value"]
        fields = {name: build(fact["fields"][name]) for name in sorted(fact["fields"])}
        if kind == "dict":
            return fields
        if kind == "tuple":
            return tuple(fields.values())
        if kind not in KNOWN:
            raise BadCheckpoint(
                f"a saved cache holds {kind!r}, which is not known here: register the part that makes it"
            )
        return KNOWN[kind](**fields)

    return build(fact)

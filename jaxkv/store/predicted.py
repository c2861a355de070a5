"""Predicted: every layer holds what its keys and values are besides that which those of the layer below say of them.

A layer's keys cannot be told without those of all layers below. For a block of a prompt or a step each layer holds its
keys and values as they are (`opened`): from the lowest layer on, each from the one before. Behind it what is new is
coded in the same order (`written`, `rejoined`), what was there keeps its codes. The layers hold the same tokens in the
same slots, which is so where nothing is evicted.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Int

from jaxkv.errors import BadValue, unknown
from jaxkv.store.codec import Codec, Fitting, small
from jaxkv.store.entries import picked, placed_at
from jaxkv.store.fit import FIT
from jaxkv.store.higgs import Higgs

LEARNED = {"keys": "key_predictor", "values": "value_predictor"}
FIRST, NEXT = "first", "next"


@dataclasses.dataclass(frozen=True)
class Predicted(Fitting):
    """K_l^ = p + Q(K_l - p), p = A_l [K_(l-1)^, 1], and V_l^ = q + Q(V_l - q), q = B_l [K_l^, V_(l-1)^, 1], of all KV
    heads' channels together. Q is `higgs` of `bits`, of `first_bits` in the lowest layer, which has no p or q.

    A and B are those of `jaxkv calibrate` with predictors, for keys before RoPE, so that a policy turns them when they
    are read (rope "cache"). `basis` says which of the two a codec is for. Layers with a sliding window hold everything
    and are left out of the chain. A prompt is coded when it has been read, and each later token behind its step. Each
    row holds A and B, in float16. Source: AQUA-KV (arXiv 2501.19392).
    """

    bits: int = 2
    first_bits: int = 4
    basis: str = "keys"
    kind: ClassVar[str] = "predicted"
    pooled: ClassVar[bool] = False
    pairs: ClassVar[bool] = True

    def __post_init__(self):
        for bits in (self.bits, self.first_bits):
            Higgs(bits)  # which checks it
        if self.basis not in LEARNED:
            raise unknown("basis of codec 'predicted'", self.basis, LEARNED)

    def check(self, head_dim: int) -> None:
        Higgs(self.bits).check(head_dim)

    def suits(self, name: str, codecs: Any, policy: Any) -> None:
        both = [getattr(codecs, each) for each in LEARNED]
        if any(not isinstance(each, Predicted) for each in both) or self.basis != name or policy.rope != "cache":
            raise BadValue(
                f"policy {policy.name!r}, rope={policy.rope!r}, {name} predicted with basis={self.basis!r}: expected "
                "keys with basis='keys' and values with basis='values' predicted together, and rope='cache', for keys "
                "are predicted before RoPE"
            )

    @property
    def learns(self) -> tuple[str, ...]:
        return (LEARNED[self.basis],)

    @property
    def _inputs(self) -> int:
        """Of what a head has: keys, or keys and values."""
        return 1 if self.basis == "keys" else 2

    def fit(
        self,
        x: Float[Array, "B Hk S D"],
        positions: Int[Array, "B Hk S"],
        queries: Float[Array, "B Hq W D"] | None,
        learned: Any,
    ) -> "Link":
        batch, heads, _, width = x.shape
        matrix = small(learned[LEARNED[self.basis]])
        by_input = matrix[:-1].reshape(self._inputs, heads, width, heads * width)  # keys of all heads, then values
        weights = jnp.moveaxis(by_input, 0, 1).reshape(heads, self._inputs * width, heads * width)
        bias = matrix[-1].reshape(heads, width)
        for_rows = lambda each: jnp.broadcast_to(each, (batch, *each.shape))  # noqa: E731
        return Link(for_rows(weights), for_rows(bias))

    def unfit(self, batch: int, heads: int, head_dim: int) -> "Link":
        shape = batch, heads, self._inputs * head_dim, heads * head_dim
        return Link(jnp.zeros(shape, jnp.float16), jnp.zeros((batch, heads, head_dim), jnp.float16))

    def fitted(self, fit: "Link | None") -> Codec:
        return self if fit is None or fit.open else Chained()

    def coder(self, link: "Link") -> Higgs:
        """What codes the differences in this layer."""
        return Higgs(self.first_bits if link.role == FIRST else self.bits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Link:
    """A layer's place in the chain: what its keys or values are predicted with, but in the lowest layer. While it is
    `open`, its codes, and where they stand, lie here."""

    weights: Float16[Array, "B Hk I N"] | None
    bias: Float16[Array, "B Hk D"] | None
    codes: Any = None
    positions: Int[Array, "B Hk C"] | None = None
    role: str = dataclasses.field(default="", metadata={"static": True})
    open: bool = dataclasses.field(default=True, metadata={"static": True})

    def predicted(self, x: Float[Array, "B Hk *S I"]) -> Float[Array, "B Hk *S D"]:
        """The prediction from what all heads have, in float32."""
        assert self.weights is not None and self.bias is not None
        batch, heads, *slots, width = x.shape
        rows = x.astype(jnp.float32).reshape(batch, heads, math.prod(slots), width)
        weights = self.weights.astype(jnp.float32)
        out = jnp.einsum("bhsi,bhin->bsn", rows, weights, precision=lax.Precision.HIGHEST)
        by_head = out.reshape(batch, out.shape[1], heads, self.bias.shape[-1])
        by_head = jnp.moveaxis(by_head, 2, 1) + self.bias.astype(jnp.float32)[:, :, None]
        return by_head.reshape(batch, heads, *slots, by_head.shape[-1])


@dataclasses.dataclass(frozen=True)
class Chained(Codec):
    """Differences to what is not known of one layer alone."""

    def decode(self, code: Any) -> Float[Array, "*slots D"]:
        raise NotImplementedError("a layer is read with those below it: `opened`")


def links(store: Any) -> dict[str, Link] | None:
    """The layer's place in a chain, of keys and of values; None where it is in none."""
    fit = store.beside.get(FIT)
    found = {name: getattr(fit, name) for name in LEARNED} if fit is not None else {}
    return found if found and all(isinstance(link, Link) and link.role for link in found.values()) else None


Both = Mapping[str, Any]  # of keys and of values


def _with(store: Any, codes: Both, places: Both) -> Any:
    fit = dataclasses.replace(store.beside[FIT], **places)
    entries = dataclasses.replace(store.entries, **codes)
    return store.replaced(entries=entries, beside={**store.beside, FIT: fit})


def _from_below(link: Link, *given: Any) -> Any:
    """The prediction from the layer below; 0 in the lowest."""
    return 0.0 if link.role == FIRST else link.predicted(jnp.concatenate(given, axis=-1))


def _through(store: Any, below: Both, code: Any) -> tuple[Both, Both]:
    """The codes of a layer's keys and values, by `code(name, coder, predicted)`, and what they stand for."""
    codes, near = {}, {}
    for name, link in (links(store) or {}).items():
        given = (below.get("keys"),) if name == "keys" else (near["keys"], below.get("values"))
        coder, predicted = getattr(store.codecs, name).coder(link), _from_below(link, *given)
        codes[name] = code(name, coder, predicted)
        more = coder.decode(codes[name])
        near[name] = (predicted + more.astype(jnp.float32)).astype(more.dtype)
    return codes, near


def _as_held(held: Any, name: str, coder: Higgs, predicted: Any) -> Any:
    """The code that lies there already."""
    return getattr(held, name)


def _coded(given: Both, name: str, coder: Higgs, predicted: Any) -> Any:
    """The code of what is left of the keys or values; its dtype is theirs."""
    code = coder.encode(given[name].astype(jnp.float32) - predicted)
    return dataclasses.replace(code, dtype=str(given[name].dtype))


def opened(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The layers with their keys and values as they are, each from the one below; their codes are put by."""
    after, below = list(layers), {}
    for number, layer in enumerate(layers):
        places = links(layer)
        if places is None:
            continue
        codes, below = _through(layer, below, functools.partial(_as_held, layer.entries))
        put_by = {
            name: dataclasses.replace(link, codes=codes[name], positions=layer.positions, open=True)
            for name, link in places.items()
        }
        after[number] = _with(layer, below, put_by)
    return tuple(after)


def _closed(link: Link) -> Link:
    return dataclasses.replace(link, codes=None, positions=None, open=False)


def written(before: Sequence[Any], layers: Sequence[Any], position: Int[Array, "B"]) -> tuple[Any, ...]:
    """The layers in codes, after a step whose token at `position [B]` (-1: a row that has finished) went into the next
    slots of `before`."""
    after, below = list(layers), {}
    for number, layer in enumerate(layers):
        places = links(layer)
        if places is None:
            continue
        slot = before[number].next_slot
        new = {name: picked(getattr(layer.entries, name), slot, flat=False) for name in places}
        codes, below = _through(layer, below, functools.partial(_coded, new))
        there = jnp.where((position >= 0)[:, None], slot, layer.slots)  # past the last: nobody's
        put = lambda x, new: placed_at(x, there, new, flat=False)  # noqa: E731, B023
        codes = {name: jax.tree.map(put, link.codes, codes[name]) for name, link in places.items()}
        after[number] = _with(layer, codes, {name: _closed(link) for name, link in places.items()})
    return tuple(after)


def _coded_or_kept(store: Any, places: Both, name: str, coder: Higgs, predicted: Any) -> Any:
    """The code of a block's slots, those of the tokens that were there before as they were."""
    code, link, positions = _coded(vars(store.entries), name, coder, predicted), places[name], store.positions
    if link.positions is None:
        return code
    order = jnp.argsort(link.positions, axis=-1, stable=True).astype(jnp.int32)  # the empty ones first
    empty = jnp.sum(link.positions < 0, axis=-1, keepdims=True, dtype=jnp.int32)
    at = jnp.take_along_axis(order, jnp.clip(empty + positions, 0, order.shape[-1] - 1), axis=-1)
    there = (positions >= 0) & (jnp.take_along_axis(link.positions, at, axis=-1) == positions)

    def old(x: Any, new: Any) -> Any:
        wide = lambda index: index.reshape(*index.shape, *(1,) * (x.ndim - 3))  # noqa: E731
        return jnp.where(wide(there), jnp.take_along_axis(x, wide(at), axis=2), new)

    return jax.tree.map(old, link.codes, code)


def rejoined(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The layers in codes, after a block that left keys and values as they are."""
    after, below = list(layers), {}
    for number, layer in enumerate(layers):
        places = links(layer)
        if places is None or not places["keys"].open:
            continue
        codes, below = _through(layer, below, functools.partial(_coded_or_kept, layer, places))
        after[number] = _with(layer, codes, {name: _closed(link) for name, link in places.items()})
    return tuple(after)


def begun(layers: Sequence[Any], windows: Sequence[int | None]) -> tuple[Any, ...]:
    """The layers behind their first prompt, whose codecs have the predictors, in a chain."""
    chain = [number for number, window in enumerate(windows) if window is None]
    after = list(layers)
    for number, layer in enumerate(layers):
        fit = layer.beside.get(FIT)
        places = {} if fit is None else {name: getattr(fit, name) for name in LEARNED}
        if not places or not all(isinstance(link, Link) and not link.role for link in places.values()):
            continue
        role = "" if number not in chain else FIRST if number == chain[0] else NEXT
        kept = (lambda link: link) if role == NEXT else (lambda link: Link(None, None))
        roles = {name: dataclasses.replace(kept(link), role=role) for name, link in places.items()}
        after[number] = _with(layer, {}, roles)
    return rejoined(after)

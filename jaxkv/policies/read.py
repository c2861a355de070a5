"""read: which of the entries held a decode step reads. So what is kept and what is read are two budgets."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxkv.checks import Checked
from jaxkv.errors import BadValue
from jaxkv.store.entries import EMPTY, Change, taken
from jaxkv.store.pages import PAGES, empty
from pallas_kernels.arguments import Judge, Token
from pallas_kernels.decode_attend_score.victim import aim
from pallas_kernels.masking import visible
from pallas_kernels.partial import GROUP, Partial, attend_few


class Read(Checked):
    """The defaults: everything is read, and no index is held."""

    kind: ClassVar[str]
    state: ClassVar[str] = ""  # the name under which its index lies beside the slots; "" for none

    def check(self, policy: Any) -> None:
        """Raises `BadValue` for a policy whose entries cannot be read so."""

    def beside(self, batch: int, heads: int, kv_heads: int, dim: int, dtype: Any) -> dict[str, Any]:
        """Its index, by the name of its state, of a layer that holds nothing. A layer without one reads everything."""
        return {}

    def everything(self, layer: int) -> bool:
        """Whether the layer reads all that it holds."""
        return True

    def bytes(self, store: Any, layer: int) -> int:
        """Bytes that a step reads of the store: of its slots, of what is beside them, of an index."""
        return store.kv_bytes

    def indexed(self, store: Any) -> Any:
        """The store with its index made anew, after a cut or with new room."""
        return store

    def widened(self, store: Any, change: Change) -> Any:
        """The store whose index knows what survivors became as they took up what a token overwrites."""
        return store

    def step(
        self, store: Any, layout: Any, token: Token, judge: Judge, rotate: Any, **softmax: Any
    ) -> tuple[Partial, Any]:
        """A decode step of a layer that does not read everything; as `Store.step`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class All(Read):
    """Everything that is held."""

    kind: ClassVar[str] = "all"


@dataclasses.dataclass(frozen=True)
class Pages(Read):
    """The `count` entries in the pages of `page` adjacent slots whose keys may have the largest q . k.

    Where nothing has left, a page is so many tokens in a row, the first one begins with the text. A page's bound is
    sum_d max(q_d min k_d, q_d max k_d) over its keys; the page of the new token is always read. Each query head chooses
    pages for itself, or, `together`, the query heads of a KV head choose those with the highest bound for one of them.
    The first `dense` layers and those with a sliding window read everything. At a step the index is read, and `count`
    entries (one page at least) for each that chooses: where query heads choose apart, that is less than everything only
    if `count` times the query heads of a KV head is. Source: Quest (arXiv 2406.10774, section 3.3), whose query heads
    choose apart; `together` is ours.
    """

    count: int = 1024
    page: int = 16
    dense: int = 2
    together: bool = False
    kind: ClassVar[str] = "pages"
    state: ClassVar[str] = PAGES

    def __post_init__(self):
        if self.page < 1 or self.count < 1 or self.dense < 0:
            raise BadValue(
                f"count={self.count}, page={self.page}, dense={self.dense}: expected pages of at least 1 slot, at "
                "least 1 entry to read, and a number of layers"
            )

    def check(self, policy: Any) -> None:
        if policy.allocate.pooled or policy.rope != "text":
            raise BadValue(
                f"policy {policy.name!r} reads pages: expected equal heads (allocate kind 'uniform') and rope='text', "
                "for a page is the same slots of every head, with keys as they are multiplied"
            )

    def beside(self, batch: int, heads: int, kv_heads: int, dim: int, dtype: Any) -> dict[str, Any]:
        return {self.state: empty(batch, kv_heads, dim, dtype, size=self.page, group=heads // kv_heads)}

    def everything(self, layer: int) -> bool:
        return layer < self.dense

    def bytes(self, store: Any, layer: int) -> int:
        index = store.beside.get(self.state)
        if index is None or self.everything(layer):
            return store.kv_bytes - (0 if index is None else index.kv_bytes)
        slots = store.kv_bytes - sum(state.kv_bytes for state in store.beside.values())
        each = min(self._pages(store.slots) * self.page, store.slots)
        entries = each if self.together else each * index.group
        return slots * entries // store.slots + store.kv_bytes - slots

    def _pages(self, slots: int) -> int:
        return min(max(self.count // self.page, 1), -(-slots // self.page))

    def indexed(self, store: Any) -> Any:
        if self.state not in store.beside:
            return store
        index = store.beside[self.state].of(store.keys, store.positions)
        return dataclasses.replace(store, beside={**store.beside, self.state: index})

    def widened(self, store: Any, change: Change) -> Any:
        if self.state not in store.beside:
            return store
        index = store.beside[self.state].with_key(change.slot, change.keys, change.slot < store.slots)
        return dataclasses.replace(store, beside={**store.beside, self.state: index})

    def step(self, store, layout, token, judge, rotate, *, scale, window, softcap, implementation, with_mass):
        active, slot = token.position >= 0, store.next_slot
        before, store = store, store.with_token(token)
        index = store.beside[self.state].with_key(slot, token.key, active[:, None])
        bound = index.score(token.query)
        bound = jnp.max(bound, axis=2, keepdims=True) if self.together else bound
        own = jnp.arange(bound.shape[-1]) == (slot // self.page)[..., None, None]
        _, pages = lax.top_k(jnp.where(own, jnp.inf, bound), self._pages(store.slots))
        at = (pages[..., None] * self.page + jnp.arange(self.page)).reshape(*pages.shape[:3], -1)
        source = jnp.minimum(at, store.slots - 1).astype(jnp.int32).reshape(*slot.shape, -1)  # [B, Hk, choices R]
        positions = jnp.take_along_axis(store.positions, source, axis=-1)
        positions = jnp.where(at.reshape(source.shape) < store.slots, positions, EMPTY)
        some = _as_it_comes(before, token, taken(store.entries, source, positions), source == slot[..., None])
        few: Any = jax.tree.map(lambda x: x.reshape(len(at), -1, at.shape[-1], *x.shape[3:]), some)  # by who chooses
        seen = visible(token.position[:, None, None], few.positions, window)
        partial = attend_few(
            token.query[:, :, None], few.keys, few.values, seen, few.weight, scale=scale, softcap=softcap,
            group="each" if with_mass else None,
        )  # fmt: skip
        mass = partial.mass
        if mass is not None:
            mass = mass.reshape(*at.shape[:3], -1, at.shape[-1])  # [B, Hk, choices, query heads of each, R]
            whole = jnp.zeros((*mass.shape[:-1], bound.shape[-1] * self.page), jnp.float32)
            at = jnp.broadcast_to(at[:, :, :, None], mass.shape)
            mass = jnp.put_along_axis(whole, at, mass, axis=-1, inplace=False)[..., : store.slots]
            mass = GROUP[judge.group](mass.reshape(*slot.shape, -1, store.slots), axis=2)
        following = aim(mass, store.positions, token.position, slot, judge, window=window)
        after = dataclasses.replace(store, next_slot=following, beside={**store.beside, self.state: index})
        partial = partial.now()
        return Partial(partial.output.astype(token.query.dtype), partial.lse, mass), after


def _as_it_comes(before: Any, token: Token, some: Any, own: Bool[Array, "B Hk R"]) -> Any:
    """Some entries of a store, plain, as the token reads them that has come into its `own` slot: itself as it is, the
    others as they were `before` it was written, for the windows have moved on with it."""
    plain = before.plain(some)

    def read(name: str, new: Float[Array, "B Hk D"]) -> Float[Array, "B Hk R D"]:
        x = getattr(plain, name)
        return x if getattr(before.codecs, name).plain else jnp.where(own[..., None], new[:, :, None], x)

    return dataclasses.replace(plain, keys=read("keys", token.key), values=read("values", token.value))


KINDS: dict[str, type[Read]] = {read.kind: read for read in (All, Pages)}

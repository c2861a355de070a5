"""Which implementation runs here: every attention operation, traced with abstract arrays of a layer's shape."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Held, Judge, Rule, Segments, Token
from pallas_kernels.codes import Codes
from pallas_kernels.decode_attend_score import api as decode_attend_score
from pallas_kernels.dispatch import Choice, Operation
from pallas_kernels.prefill_attend import api as prefill_attend
from pallas_kernels.prefill_attend_mass import api as prefill_attend_mass
from pallas_kernels.ragged_decode import api as ragged_decode

Form = Callable[[jax.Array], jax.Array | Codes]  # of keys or values [*slots, D], what lies in the slots


def choices(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    slots: int,
    dtype: Any,
    batch: int = 1,
    tokens: int = 128,
    platform: str | None = None,
    codes: tuple[Form, Form] | None = None,
    rotate: bool = False,
    apart: bool = False,
) -> dict[str, Choice]:
    """By operation, what runs in a layer of this shape: `slots` per KV head, and `tokens` queries at prefill. Nothing
    runs, and nothing is compiled. `platform` is the default backend's, or another one, as jax names it. `codes` make
    of keys and of values what decode reads of them; a block of a prompt is given floats. With `rotate` decode of equal
    heads turns all keys as it reads them; with `apart` it gives the mass of each query head, for a merge with what is
    read beside the slots.
    """
    platform = platform or jax.default_backend()
    scale = head_dim**-0.5
    floats = lambda *shape: jnp.zeros(shape, dtype)  # noqa: E731
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731

    def lying(*shape: int) -> tuple[Any, Any]:
        x = floats(*shape)
        return (x, x) if codes is None else (codes[0](x), codes[1](x))

    def step(call: Callable, held: Held | Segments, **how: Any) -> Any:
        new = lying(batch, kv_heads, head_dim)
        key, value = (floats(*x.shape) for x in new)
        codes = (x if isinstance(x, Codes) else None for x in new)
        token = Token(floats(batch, heads, key.shape[-1]), key, value, ints(batch), *codes)
        judge = Judge(ints(batch), ints(batch), rule=Rule("each"))
        judge = judge._replace(rule=None, group="each") if apart else judge
        return call(token, held, ints(batch, kv_heads), judge, scale=scale, **how)

    def equal(call: Callable) -> Any:
        held = Held(*lying(batch, kv_heads, slots, head_dim), ints(batch, kv_heads, slots))
        return step(call, held, rotate=(lambda queries, keys, _: (queries, keys)) if rotate else None)

    def pooled(call: Callable) -> Any:
        entries = lying(batch, kv_heads * slots, head_dim)
        return step(call, Segments(*entries, ints(batch, kv_heads * slots), ints(batch, kv_heads + 1)))

    def block(call: Callable, what: int) -> Any:
        queries, entries = floats(batch, heads, tokens, head_dim), floats(batch, kv_heads, slots, head_dim)
        at = ints(batch, tokens), ints(batch, kv_heads, slots)
        return call(queries, *[entries] * what, *at, scale=scale)

    ways: tuple[tuple[Operation, Callable], ...] = (
        (decode_attend_score.OPERATION, equal),
        (ragged_decode.OPERATION, pooled),
        (prefill_attend.OPERATION, functools.partial(block, what=2)),  # keys and values
        (prefill_attend_mass.OPERATION, functools.partial(block, what=1)),  # keys
    )

    def traced(operation: Operation, way: Callable) -> Choice:
        def run(call: Callable) -> None:
            jax.eval_shape(lambda: jax.tree.leaves(way(call)))

        return operation.first(platform, run)[1]

    return {operation.name: traced(operation, way) for operation, way in ways}

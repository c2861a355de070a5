"""One decoder for every family: embeddings, layers of attention and gated MLP, a last norm and the output matrix.

The modules hold weights only. What attention looks at, and what is kept of it, is up to the `attend` callback.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import AttentionSpec, ModelConfig
from jaxkv.models.joined import split_heads, split_strips
from jaxkv.models.linear import PANEL, lookup, packed_shape, plain, project, unembed

S = TypeVar("S")
Attend = Callable[..., tuple[jax.Array, Any]]
Lay = Callable[[str, jax.Array], jax.Array]
Route = Callable[[int, jax.Array, Any, Attend], tuple[jax.Array, Attend]]
Fold = Callable[[Any, Any, AttentionSpec, Any], tuple[Any, Any]]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
}


def _before(x: Float[Array, "B T N"], behind: int) -> Float[Array, "B 1 N"]:
    """The one token with so many behind it."""
    at = x.shape[1] - 1 - behind
    return x[:, at : at + 1]


class Init:
    """Makes random weights: normal with variance 1/in, norms of one, biases of zero."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any, panels: bool):
        self.rngs, self.dtype, self.panels = rngs, dtype, panels

    def matrix(self, rows: int, columns: int) -> nnx.Param:
        shape = packed_shape(rows, columns, self.panels)
        return nnx.Param((jax.random.normal(self.rngs.params(), shape) * rows**-0.5).astype(self.dtype))

    def table(self, rows: int, columns: int, panels: bool) -> nnx.Param:
        shape = packed_shape(columns, rows, True) if panels and rows % PANEL == 0 else (rows, columns)
        return nnx.Param((jax.random.normal(self.rngs.params(), shape) * columns**-0.5).astype(self.dtype))

    def bias(self, size: int) -> nnx.Param:
        return nnx.Param(jnp.zeros(size, self.dtype))

    def norm(self, size: int) -> nnx.Param:
        return nnx.Param(jnp.ones(size, jnp.float32))  # norms are small and computed in float32: kept so


def rms_norm(x: Float[Array, "*lead M"], weight: Float[Array, "M"], eps: float) -> Float[Array, "*lead M"]:
    """x / rms(x) * weight, computed in float32, in x's dtype (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, init: Init):
        self.config = config
        width, dims = config.hidden_size, config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        self.attention_norm = init.norm(width)
        self.qkv = init.matrix(width, heads * dims)
        if config.qkv_bias:
            self.qkv_bias = init.bias(heads * dims)
        if config.qk_norm:
            self.q_norm, self.k_norm = init.norm(dims), init.norm(dims)
        self.out = init.matrix(config.num_heads * dims, width)
        self.mlp_norm = init.norm(width)
        self.gate_up = init.matrix(width, 2 * config.intermediate_size)
        self.down = init.matrix(config.intermediate_size, width)
        if config.post_norms:
            self.post_attention_norm, self.post_mlp_norm = init.norm(width), init.norm(width)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        spec: AttentionSpec,
        state: S,
        attend: Attend,
        lay: Lay,
        behind: int | None = None,
        sizes: bool = False,
    ) -> tuple[jax.Array, S]:
        """The stream after this layer (of the token with so many `behind` it alone, if given), and the new state."""
        seen = self._norm(x, self.attention_norm)
        if sizes:
            attend = functools.partial(attend, sizes=jnp.linalg.norm(seen.astype(jnp.float32), axis=-1))
        mixed, state = self.attention(seen, spec, state, attend, lay, behind)
        x = x if behind is None else _before(x, behind)
        if self.config.post_norms:
            mixed = self._norm(mixed, self.post_attention_norm)
        x = lay("stream", x + mixed)
        mixed = self.mlp(self._norm(x, self.mlp_norm))
        if self.config.post_norms:
            mixed = self._norm(mixed, self.post_mlp_norm)
        return lay("stream", x + mixed), state

    def attention(
        self, x: jax.Array, spec: AttentionSpec, state: S, attend: Attend, lay: Lay, behind: int | None = None
    ) -> tuple[jax.Array, S]:
        """Query, key and value (biased, normed, not yet rotated) to `attend`, and its context through `out`."""
        batch, length, _ = x.shape
        mixed = lay("qkv", project(x, self.qkv[...]))
        if self.config.qkv_bias:
            mixed = mixed + self.qkv_bias[...]
        query, key, value = split_heads(mixed, spec.num_kv_heads, spec.head_dim)
        if self.config.qk_norm:
            query, key = self._norm(query, self.q_norm), self._norm(key, self.k_norm)
        context, state = attend(spec, query, key, value, state)
        context = context.reshape(batch, length, -1)
        return project(context if behind is None else _before(context, behind), self.out[...]), state

    def mlp(self, x: jax.Array) -> jax.Array:
        """activation(gate) * up, projected down."""
        gate, up = split_strips(project(x, self.gate_up[...]))
        return project(ACTIVATIONS[self.config.activation](gate) * up, self.down[...])

    def _norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        return rms_norm(x, weight[...], self.config.norm_eps)


def _traced_once(attend: Attend, lay: Lay, sizes: bool) -> Callable[..., tuple[jax.Array, Any]]:
    """A layer's call as a program of its own: layers that are alike are traced and lowered once, which is most of
    the time between a call and its first token but for XLA's own (the compiled code is the same)."""

    @functools.partial(jax.jit, static_argnames=("spec", "behind"))
    def run(layer: Any, x: jax.Array, spec: AttentionSpec, state: Any, behind: int | None) -> tuple[jax.Array, Any]:
        return layer(x, spec, state, attend, lay, behind, sizes)

    return run


def _scanned(
    run: Callable[..., tuple[jax.Array, Any]],
    layers: Sequence[Any],
    first: int,
    x: jax.Array,
    spec: AttentionSpec,
    states: Any,
    fold: Fold,
    carried: Any,
) -> tuple[jax.Array, list[Any], Any]:
    """Layers that are alike, from number `first` on, one after the other in a loop: XLA compiles one of them, and each
    turn copies its weights to where that one has them (stacked ones would be in memory twice)."""
    weights = [lambda layer=layer: layer for layer in layers]
    before = after = jax.tree.structure(states[0])

    def turn(carry, own):
        nonlocal after
        (x, carried), (index, leaves) = carry, own
        x, state = run(lax.switch(index, weights), x, spec, jax.tree.unflatten(before, leaves), None)
        carried, state = fold(carried, first + index, spec, state)
        leaves, after = jax.tree.flatten(state)
        return (x, carried), leaves

    # The loop carries leaves: stacked, they would not have the shapes that a state says its arrays have
    stacked = [jnp.stack(leaves) for leaves in zip(*map(jax.tree.leaves, states), strict=True)]
    (x, carried), new = lax.scan(turn, (x, carried), (jnp.arange(len(layers)), stacked))
    return x, [jax.tree.unflatten(after, [leaf[index] for leaf in new]) for index in range(len(layers))], carried


def _alike(specs: Sequence[AttentionSpec], states: Sequence[Any], behind: int | None, begins: bool) -> list[range]:
    """The layers in runs whose attention and states have the same form; the last by itself where it does less, and the
    first with its attention where what is folded `begins` there."""
    form = lambda state: (jax.tree.structure(state), *map(jax.typeof, jax.tree.leaves(state)))  # noqa: E731
    forms = [(spec, form(state)) for spec, state in zip(specs, states, strict=True)]
    last = len(forms) - 1
    alone = {specs.index(spec) for spec in specs} if begins else set()
    alone |= {last} if behind is not None else set()
    apart = (at for at in range(1, last + 1) if forms[at] != forms[at - 1] or {at, at - 1} & alone)
    return list(itertools.starmap(range, itertools.pairwise((0, *apart, last + 1))))


def _kept_apart(carried: Any, layer: Any, spec: AttentionSpec, state: Any) -> tuple[Any, Any]:
    """Nothing is folded."""
    return carried, state


def through[State](
    layers: Sequence[Any],
    specs: Sequence[AttentionSpec],
    x: jax.Array,
    states: Sequence[State],
    attend: Attend,
    lay: Lay,
    behind: int | None,
    route: Route | None,
    sizes: bool,
    scan: bool,
    fold: Fold | None = None,
) -> tuple[jax.Array, tuple[State, ...]]:
    """The stream after all layers, and their new states: what `Decoder` does between embedding and last norm. The
    layers are called as `Layer` is."""
    new: list[Any] = []
    carried: Any = None
    each = fold or _kept_apart
    last = len(specs) - 1
    run = _traced_once(attend, lay, sizes)
    alone = [range(index, index + 1) for index in range(last + 1)]
    for alike in _alike(specs, states, behind, fold is not None) if scan and route is None else alone:
        index, spec = alike.start, specs[alike.start]
        if len(alike) > 1:
            some, given = [layers[at] for at in alike], [states[at] for at in alike]
            x, left, carried = _scanned(run, some, index, x, spec, given, each, carried)
            new.extend(left)
            continue
        x, state = run(layers[index], x, spec, states[index], behind if index == last else None)
        carried, state = each(carried, index, spec, state)
        if fold is not None:  # before the next layer runs, or its memory would be needed beside what this one left
            x, carried = lax.optimization_barrier((x, carried))
        new.append(state)
        if route is not None:
            x, following = route(index, x, state.notes, attend)
            if following is not attend:
                attend, run = following, _traced_once(following, lay, sizes)
    if fold is not None:
        new.append(carried)
    return x, tuple(new)


class Decoder(nnx.Module):
    """Tokens -> hidden states -> logits. `panels` chooses how matrices lie in memory (see `linear.py`)."""

    attends: ClassVar[bool] = True  # what a layer attends to goes on

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, panels: bool = False):
        init = Init(rngs, dtype, panels)
        self.config = config
        self.embed = init.table(config.vocab_size, config.hidden_size, panels and config.tie_embeddings)
        self.layers = nnx.List([Layer(config, init) for _ in range(config.num_layers)])
        self.norm = init.norm(config.hidden_size)
        if not config.tie_embeddings:
            self.head = init.matrix(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        states: Sequence[S],
        attend: Attend,
        lay: Lay = lambda name, x: x,
        behind: int | None = None,
        route: Route | None = None,
        sizes: bool = False,
        scan: bool = False,
        fold: Fold | None = None,
    ) -> tuple[Float[Array, "B _ M"], tuple[S, ...]]:
        """The final-norm hidden states (of the token with so many `behind` it alone, if given: the last layer is
        cheaper then), and the new per-layer states.

        `attend(spec, query [B, T, Hq, D], key [B, T, Hk, D], value [B, T, Hk, D], state) -> (context [B, T, Hq, D],
        state)` gets query and key before RoPE, after bias and q/k-norm; with `sizes` also `sizes=[B, T]`, the L2 norms
        of the normed hidden states that they were made of, float32. It is traced once for layers that are alike, so
        what differs between them comes with the states, pytrees. `lay(name, x)` gets the residual "stream" each time
        that something was added to it, and the joined product "qkv", and gives them back laid out over devices.
        `route(layer, stream, state.notes, attend)` may send only some of the tokens on to the layers after this one.
        With `scan`, and no route, layers that are alike run as one `lax.scan`: compiled sooner, a bit slower to run.
        `fold(carried, layer, spec, state) -> (carried, state)` comes after each layer; `carried` is None at first, has
        one form from the first layer of each spec on, and stands behind the states.
        """
        x = lay("stream", lookup(self.embed[...], tokens))
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        x, new = through(self.layers, self.specs, x, states, attend, lay, behind, route, sizes, scan, fold)
        return rms_norm(x, self.norm[...], self.config.norm_eps), new

    def logits(self, hidden: Float[Array, "*lead M"]) -> Float[Array, "*lead V"]:
        """Next-token logits, float32, soft-capped where the family does."""
        if self.config.tie_embeddings:
            logits = unembed(hidden, self.embed[...], jnp.float32)
        else:
            logits = project(hidden, self.head[...], jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def output_matrix(self, layer: int) -> Float[Array, "Hq D M"]:
        """The output matrix of one layer's attention, by query heads."""
        return plain(self.layers[layer].out[...]).reshape(self.config.num_heads, self.config.head_dim, -1)

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The facts of every layer's attention."""
        return self.config.specs

"""One configurable decoder: embedding, layers of attention and MLP, final norm, output head.

It is used purely: split once into a graph definition and weights, merged inside the jitted step. It knows nothing of
caches or positions: `attend` gets each layer's query, key and value before RoPE, and a state that the model only
hands through.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig

State = TypeVar("State")
PANEL = 64  # output columns side by side in a panel
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


def project(x: Float[Array, "*B I"], weight: Float[Array, "..."]) -> Float[Array, "*B O"]:
    """x @ weight, the weight as [I, O] or in panels [O/64, I, 64].

    Panels make a CPU read the weights as one stream when there are few rows; with many rows they are joined again.
    """
    if weight.ndim == 2:
        return x @ weight
    panels, inputs, width = weight.shape
    rows = x.reshape(-1, inputs)
    if rows.shape[0] > 32:
        out = rows @ weight.swapaxes(0, 1).reshape(inputs, panels * width)
    else:
        each = jnp.broadcast_to(rows[None], (panels, *rows.shape))
        out = lax.dot_general(each, weight, (((2,), (1,)), ((0,), (0,)))).swapaxes(0, 1).reshape(-1, panels * width)
    return out.reshape(*x.shape[:-1], panels * width)


class Linear(nnx.Module):
    """x @ weight (+ bias)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(inputs**-0.5)
        self.weight = nnx.Param(init(rngs.params(), (inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        out = project(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...]


class Norm(nnx.Module):
    """x / rms(x) * (offset + weight), reckoned in float32."""

    def __init__(self, size: int, config: ModelConfig, *, dtype):
        self.weight = nnx.Param(jnp.full(size, 1.0 - config.norm_offset, dtype))
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Float[Array, "*B M"]) -> Float[Array, "*B M"]:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class Attention(nnx.Module):
    """The projections around the attention that `attend` does; query, key and value come from one fused matrix."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = Linear(config.hidden_size, width, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(self.heads * self.dim, config.hidden_size, dtype=dtype, rngs=rngs)
        self.q_norm = Norm(self.dim, config, dtype=dtype) if config.qk_norm else None
        self.k_norm = Norm(self.dim, config, dtype=dtype) if config.qk_norm else None

    def __call__(self, x: Float[Array, "B T M"], state: State, attend: Callable) -> tuple[Float[Array, "B T M"], State]:
        q, k, v = jnp.split(
            self.qkv(x).reshape(*x.shape[:2], -1, self.dim), [self.heads, self.heads + self.kv_heads], axis=2
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        context, state = attend(q, k, v, state)
        return self.out(context.reshape(*x.shape[:2], -1)), state


class MLP(nnx.Module):
    """down(activation(gate) * up), gate and up from one fused matrix."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with post-norms each branch is normed before it is added."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = Norm(config.hidden_size, config, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = Norm(config.hidden_size, config, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.attention_post = Norm(config.hidden_size, config, dtype=dtype) if config.post_norms else None
        self.mlp_post = Norm(config.hidden_size, config, dtype=dtype) if config.post_norms else None

    def __call__(self, x: Float[Array, "B T M"], state: State, attend: Callable) -> tuple[Float[Array, "B T M"], State]:
        branch, state = self.attention(self.attention_norm(x), state, attend)
        x = x + (branch if self.attention_post is None else self.attention_post(branch))
        branch = self.mlp(self.mlp_norm(x))
        return x + (branch if self.mlp_post is None else self.mlp_post(branch)), state


class Decoder(nnx.Module):
    """tokens -> hidden states of the last layer, normed; `logits` turns them into the vocabulary."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        init = nnx.initializers.normal(1.0)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = Norm(config.hidden_size, config, dtype=dtype)
        head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        self.head = head

    def __call__(
        self, tokens: Int[Array, "B T"], states: Sequence[State], attend: Callable
    ) -> tuple[Float[Array, "B T M"], tuple[State, ...]]:
        """Run every layer; `attend(spec, query, key, value, state)` gives the context and the layer's new state.

        Query `[B, T, Hq, D]`, key and value `[B, T, Hk, D]` come before RoPE, after bias and q/k-norm.
        """
        table = self.embedding[...]
        x = table[tokens] if table.ndim == 2 else table[tokens // PANEL, :, tokens % PANEL]
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        after = []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, states[index], functools.partial(attend, self.config.attention_spec(index)))
            after.append(state)
        return self.norm(x), tuple(after)

    def logits(self, hidden: Float[Array, "*B M"]) -> Float[Array, "*B V"]:
        """Next-token logits in float32, soft-capped where the family does."""
        if self.head is not None:
            out = self.head(hidden)
        else:
            table = self.embedding[...]
            out = jnp.einsum("...m,vm->...v", hidden, table) if table.ndim == 2 else project(hidden, table)
        out = out.astype(jnp.float32)
        cap = self.config.logit_softcap
        return out if cap is None else cap * jnp.tanh(out / cap)


@functools.lru_cache
def graphdef(config: ModelConfig) -> nnx.GraphDef:
    """The model without its weights: `nnx.merge(graphdef(config), weights)` inside a jitted function."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]


def abstract_weights(config: ModelConfig, dtype=jnp.float32) -> nnx.State:
    """Shapes and dtypes of the weights."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype)))[1]

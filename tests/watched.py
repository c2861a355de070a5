"""The attention of a full pass over one text, layer by layer, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.rope import rotate
from jaxkv.run import model_of


def watched(params, tokens):
    """Every layer's queries before and after RoPE [T, Hq, D], and its attention weights [Hq, T, T], in NumPy."""
    positions, seen = jnp.arange(len(tokens)), np.tri(len(tokens), dtype=bool)

    def attend(spec, query, key, value, _):
        turned, keys = (rotate(x[0], positions[:, None], spec.rope) for x in (query, key))
        keys, values = (jnp.repeat(x, query.shape[2] // x.shape[1], axis=1) for x in (keys, value[0]))
        logits = jnp.einsum("thd,shd->hts", turned, keys) * spec.scale
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        context = jnp.einsum("hts,shd->thd", weights, values)
        return context[None].astype(query.dtype), (query[0], turned, keys)

    def weights(spec, turned, keys):
        logits = np.einsum("thd,shd->hts", turned, keys) * spec.scale
        logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    model, config = model_of(params.config, params.weights), params.config
    _, out = model(jnp.asarray(tokens)[None], (None,) * config.num_layers, attend)
    seen_by = [(spec, *map(np.asarray, each)) for spec, each in zip(config.specs, out, strict=True)]
    return [(query, turned, weights(spec, turned, keys)) for spec, query, turned, keys in seen_by]

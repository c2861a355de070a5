"""The attention of a full pass over one text, layer by layer, in NumPy."""

import jax.numpy as jnp
import numpy as np

from jaxkv.models.rope import rotate
from jaxkv.run import model_of


def watched(params, tokens):
    """Every layer's queries before and after RoPE [T, Hq, D], and its attention weights [Hq, T, T], in NumPy."""
    out, positions = [], jnp.arange(len(tokens))

    def attend(spec, query, key, value, _):
        turned = np.asarray(rotate(query[0], positions[:, None], spec.rope))
        keys = np.asarray(rotate(key[0], positions[:, None], spec.rope))
        group = turned.shape[1] // keys.shape[1]
        logits = np.einsum("thd,shd->hts", turned, keys.repeat(group, axis=1)) * spec.scale
        logits = np.where(np.tri(len(tokens), dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out.append((np.asarray(query[0]), turned, weights))
        context = np.einsum("hts,shd->thd", weights, np.asarray(value[0]).repeat(group, axis=1))
        return jnp.asarray(context[None], query.dtype), None

    model = model_of(params.config, params.weights)
    model(jnp.asarray(tokens)[None], (None,) * params.config.num_layers, attend)
    return out

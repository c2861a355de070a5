"""Save a cache with orbax and go on from it later, bit for bit, in another process."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxkv.cache import KVCache, LayerCache
from jaxkv.errors import BadCheckpoint
from jaxkv.model_pool import Share
from jaxkv.policies.policy import from_dict, to_dict
from jaxkv.pool import Pool
from jaxkv.rest import Rest
from jaxkv.sharding.hosts import together
from jaxkv.sharding.layout import ONE_DEVICE, Layout

FORMAT = 1


def save(cache: KVCache, path: str | os.PathLike) -> Path:
    """Write the cache to a new folder, all of it or nothing. Raises `BadCheckpoint` where something stands already.

    On many hosts each calls this, with a path that all of them see, and writes its own parts.
    """
    path = Path(path).absolute()
    if path.exists():
        raise BadCheckpoint(f"{path} exists already: expected a new path; remove it or save elsewhere")
    together("jaxkv.save")  # every host has looked before one of them begins to write
    facts = {
        "format": FORMAT,
        "model": cache.model,
        "policy": to_dict(cache.policy),
        "layers": [_shape_of(layer) for layer in cache.layers],
        "batch": cache.batch,
        "text": None if cache.tokens is None else cache.tokens.shape[1],
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path, ocp.args.Composite(cache=ocp.args.StandardSave(_arrays(cache)), facts=ocp.args.JsonSave(facts))
        )
    return path


def restore(path: str | os.PathLike, params: Any = None) -> KVCache:
    """The cache that was saved at `path`. With `params`, it must have been made by that model, and goes to its mesh.

    Raises `BadCheckpoint` for a path that holds no cache, a corrupt one, or one of another model.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise BadCheckpoint(f"{path}: no saved cache there; expected a folder that jaxkv.save wrote")
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            facts = checkpointer.restore(path, ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
            if facts.get("format") != FORMAT:
                raise BadCheckpoint(f"{path}: format {facts.get('format')}, expected {FORMAT}; save it again")
            layout = ONE_DEVICE if params is None else params.layout
            template = _template(facts, layout)
            arrays = checkpointer.restore(path, ocp.args.Composite(cache=ocp.args.StandardRestore(template)))["cache"]
    except BadCheckpoint:
        raise
    except Exception as error:
        raise BadCheckpoint(
            f"{path}: not a readable saved cache ({type(error).__name__}: {error}); save it again"
        ) from error
    if params is not None and params.fingerprint != facts["model"]:
        raise BadCheckpoint(
            f"{path}: made by model {facts['model']}, but these params are {params.fingerprint}; load that model"
        )
    cache = KVCache(
        layers=tuple(map(_layer, arrays["layers"], facts["layers"])),
        lengths=arrays["lengths"],
        limits=arrays["limits"],
        pending=arrays["pending"],
        policy=from_dict(facts["policy"]),
        model=facts["model"],
        tokens=np.asarray(arrays["tokens"]) if "tokens" in arrays else None,
    )
    return layout.cache(cache)


def _arrays(cache: KVCache) -> dict[str, Any]:
    held = [layer.line if isinstance(layer, Share) else layer for layer in cache.layers]
    layers = [{} if layer is None else _fields(layer) for layer in held]
    arrays = {"layers": layers, "lengths": cache.lengths, "limits": cache.limits, "pending": cache.pending}
    return arrays if cache.tokens is None else {**arrays, "tokens": cache.tokens}


def _fields(layer: LayerCache | Pool | Rest) -> dict[str, Any]:
    """A layer's arrays by name, those of its rest as a table in it, where it has one."""
    held = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return {name: _fields(x) if isinstance(x, Rest) else x for name, x in held.items() if x is not None}


def _layer(arrays: dict[str, Any], fact: dict[str, Any]) -> LayerCache | Pool | Share:
    """A layer of its arrays; of a model's pool, its place."""
    if "rest" in arrays:
        arrays = {**arrays, "rest": Rest(**arrays["rest"])}
    if "share" in fact:
        return Share(Pool(**arrays) if arrays else None, **fact["share"])
    return (Pool if "offsets" in arrays else LayerCache)(**arrays)


def _shape_of(layer: LayerCache | Pool | Share) -> dict[str, Any]:
    if isinstance(layer, Share):
        place = {"number": layer.number, "reach": layer.reach, "heads": layer.heads}
        return {"share": place} | ({} if layer.line is None else _shape_of(layer.line))
    fact = {"shape": list(layer.keys.shape), "dtype": str(layer.keys.dtype), "stats": sorted(layer.stats)}
    return {**fact, "heads": layer.heads, "rest": layer.rest is not None} if isinstance(layer, Pool) else fact


def _template(facts: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Shapes, dtypes and places of the saved arrays, from the facts beside them."""
    batch = facts["batch"]

    def array(shape, dtype, divided=True):
        axes = layout.slot_axes(len(shape)) if divided else (None,) * len(shape)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout.sharding(shape, axes))

    def layer(fact):
        if "shape" not in fact:
            return {}
        shape, flat = tuple(fact["shape"]), tuple(fact["shape"][:-1])
        heads = (batch, fact.get("heads", flat[1]))
        more = {"offsets": array((batch, heads[1] + 1), jnp.int32, divided=False)} if "heads" in fact else {}
        if fact.get("rest"):
            means, count = (array(each, jnp.float32, divided=False) for each in ((*heads, shape[-1]), heads))
            more |= {"rest": {"keys": means, "values": means, "count": count}}
        return more | {
            "keys": array(shape, fact["dtype"]),
            "values": array(shape, fact["dtype"]),
            "positions": array(flat, jnp.int32),
            "next_slot": array(heads, jnp.int32),
            "stats": {name: array(flat, jnp.float32) for name in fact["stats"]},
        }

    text = facts.get("text")
    tokens = {} if text is None else {"tokens": array((batch, text), jnp.int32, divided=False)}
    return tokens | {
        "layers": [layer(fact) for fact in facts["layers"]],
        "lengths": array((batch,), jnp.int32, divided=False),
        "limits": array((len(facts["layers"]), batch), jnp.int32, divided=False),
        "pending": array((batch,), jnp.int32, divided=False),
    }

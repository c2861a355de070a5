"""Save a cache with orbax and go on from it later, bit for bit, in another process."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxkv import digests
from jaxkv.checks import shown
from jaxkv.errors import BadCheckpoint, BadValue, JaxkvError, first_line
from jaxkv.folders import appearing_folder
from jaxkv.policies.policy import from_dict, to_dict
from jaxkv.request import check_model
from jaxkv.sharding.hosts import together
from jaxkv.sharding.layout import ONE_DEVICE, Layout, on_host
from jaxkv.store import KVCache
from jaxkv.store.described import arrays_in, arrays_of, described, rebuilt
from jaxkv.weights.orbax_folder import check_shared, written

FORMAT = 7


def save(cache: KVCache, path: str | os.PathLike) -> Path:
    """Write the cache to a new folder, all of it or nothing. Raises `BadCheckpoint` where something stands already.

    On many hosts each calls this, with a path that all of them see, and writes its own parts.
    """
    if not isinstance(cache, KVCache):
        raise BadValue(f"cache={shown(cache)}: expected a KVCache, such as the .cache that jaxkv.generate gives")
    check_shared("a cache", cache.layers)
    path = Path(path).absolute()
    if path.exists():
        raise BadCheckpoint(f"{path} exists already: expected a new path; remove it or save elsewhere")
    together("jaxkv.save")  # every host has looked before one of them begins to write
    facts = {
        "format": FORMAT,
        "model": cache.model,
        "policy": to_dict(cache.policy),
        "layers": [described(layer) for layer in cache.layers],
        "batch": cache.batch,
        "text": None if cache.tokens is None else cache.tokens.shape[1],
        "draws": None if cache.draws is None else cache.draws.tolist(),
    }
    arrays = _arrays(cache)
    with appearing_folder(path, sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))) as draft:
        written(draft, cache=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts))
        if jax.process_index() == 0:
            digests.write(draft)
    return path


def restore(path: str | os.PathLike, params: Any = None) -> KVCache:
    """The cache that was saved at `path`. With `params`, it must have been made by that model, and goes to its mesh.

    Every file is held against its digest before it is read. Raises `BadCheckpoint` for a path that holds no cache, a
    corrupt one, one of another model, or one whose policy has a part that is not registered.
    """
    if params is not None:
        check_model(params)
    path = Path(path).absolute()
    if not path.is_dir():
        raise BadCheckpoint(f"{path}: no saved cache there; expected a folder that jaxkv.save wrote")
    if damage := digests.damage(path):
        raise BadCheckpoint(
            f"{path}: not a readable saved cache ({damage}); expected a folder that jaxkv.save wrote, whole"
        )
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
            f"{path}: not a readable saved cache ({type(error).__name__}: {first_line(error)}); save it again"
        ) from error
    if params is not None and params.fingerprint != facts["model"]:
        raise BadCheckpoint(
            f"{path}: made by model {facts['model']}, but these params are {params.fingerprint}; load that model"
        )
    try:
        policy = from_dict(facts["policy"])
    except JaxkvError as error:
        raise BadCheckpoint(f"{path}: its policy cannot be made here ({error})") from error
    if layout.mesh is None:  # as decoding leaves them: programs for arrays that are bound to a device are others
        arrays = jax.tree.map(lambda array: jnp.asarray(on_host(array)), arrays)
    cache = KVCache(
        layers=tuple(map(rebuilt, facts["layers"], arrays["layers"])),
        lengths=arrays["lengths"],
        limits=arrays["limits"],
        pending=arrays["pending"],
        policy=policy,
        model=facts["model"],
        tokens=np.asarray(arrays["tokens"]) if "tokens" in arrays else None,
        draws=None if facts.get("draws") is None else np.array(facts["draws"], np.int32),
    )
    return layout.cache(cache)


def _arrays(cache: KVCache) -> dict[str, Any]:
    layers = [arrays_of(layer) for layer in cache.layers]
    arrays = {"layers": layers, "lengths": cache.lengths, "limits": cache.limits, "pending": cache.pending}
    return arrays if cache.tokens is None else {**arrays, "tokens": cache.tokens}


def _template(facts: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Shapes, dtypes and places of the saved arrays, from the facts beside them."""

    def array(shape: Any, dtype: Any, axes: Any = None) -> jax.ShapeDtypeStruct:
        place = layout.sharding(shape, axes or (None,) * len(shape))
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=place)

    def layer(fact: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        return [array(each["shape"], each["dtype"], layout.axes(each["dims"])) for each in arrays_in(fact)]

    batch = facts["batch"]
    text = facts.get("text")
    tokens = {} if text is None else {"tokens": array((batch, text), jnp.int32)}
    return tokens | {
        "layers": [layer(fact) for fact in facts["layers"]],
        "lengths": array((batch,), jnp.int32),
        "limits": array((len(facts["layers"]), batch), jnp.int32),
        "pending": array((batch,), jnp.int32),
    }

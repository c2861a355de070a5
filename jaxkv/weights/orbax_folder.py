"""Weights as an orbax checkpoint: every host writes and reads only the parts that its devices hold."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxkv import digests
from jaxkv.errors import BadCheckpoint, BadValue, BadWeights, first_line
from jaxkv.folders import appearing_folder
from jaxkv.models import ModelConfig, abstract_weights
from jaxkv.models.linear import Blocks, as_held, packed, packed_table, plain, quantised, settled
from jaxkv.models.rope import Rope
from jaxkv.sharding.hosts import somewhere, together
from jaxkv.sharding.layout import Layout, on_host
from jaxkv.weights import learned
from jaxkv.weights.params import Params
from jaxkv.weights.source import INSIDE

FORMAT = 3


def save_weights(params: Params, path: str | os.PathLike) -> Path:
    """Write weights, config, tokenizer and calibration to a new folder that `load` reads, all of it or nothing.

    On many hosts each calls this, with a path that all of them see. Raises `BadCheckpoint` where something stands
    already, and `BadValue` for weights in blocks.
    """
    check_shared("weights", params.weights)
    path = Path(path).absolute()
    if any(isinstance(leaf.get_value(), Blocks) for _, leaf in nnx.to_flat_state(params.weights)):
        raise BadValue("weights in blocks are not saved: save them as floats, and load that with weights=")
    if path.exists():
        raise BadCheckpoint(f"{path} exists already: expected a new path; remove it or save elsewhere")
    together("jaxkv.save_weights")  # every host has looked before one of them begins to write
    flat = {
        tuple(map(str, where)): _plain(str(where[-1]), leaf[...]) for where, leaf in nnx.to_flat_state(params.weights)
    }
    weights = unflatten_dict(flat)
    facts = {"format": FORMAT, "config": dataclasses.asdict(params.config)}
    with appearing_folder(path, sum(leaf.nbytes for leaf in jax.tree.leaves((weights, params.learned)))) as draft:
        written(draft / INSIDE, weights=ocp.args.StandardSave(weights), facts=ocp.args.JsonSave(facts))
        if jax.process_index() == 0:
            digests.write(draft / INSIDE)
            if params.tokenizer is not None:
                params.tokenizer.save_pretrained(draft)
            if params.learned:  # where `jaxkv calibrate` puts it
                learned.write(params.learned, draft / learned.file_name(params.fingerprint))
    return path


def check_shared(what: str, arrays: Any) -> None:
    """Raises `BadValue` where many hosts run and an array lies on one host's devices, which orbax cannot write."""
    count = jax.process_count()
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and len({each.process_index for each in leaf.sharding.device_set}) < count:
            raise BadValue(
                f"{what} of this host's devices, where {count} processes run: expected a mesh of all of them, as "
                "jaxkv.load(model, mesh=jaxkv.mesh(...)) puts it there; or save where the hosts are not joined"
            )


def written(path: Path, **what: Any) -> None:
    """A checkpoint of orbax with these items. Raises `BadCheckpoint` where it cannot be written."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.CRITICAL)  # pages of what its threads raised, which the one error says
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, ocp.args.Composite(**what))
    except jax.errors.JaxRuntimeError:  # another host is gone
        raise
    except Exception as error:
        others = ", unless another host has failed, which says why" if jax.process_count() > 1 else ""
        raise BadCheckpoint(
            f"a checkpoint cannot be written ({type(error).__name__}: {first_line(error)}): make room there, or give "
            f"another path{others}"
        ) from error
    finally:
        log.setLevel(before)


def config_of(folder: Path) -> ModelConfig:
    """The config beside the weights. Raises `BadWeights`."""
    _check(folder, digests.damage(folder / INSIDE, within="facts/"))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            facts = checkpointer.restore(folder / INSIDE, ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
            if facts["format"] != FORMAT:
                raise BadWeights(f"{folder}: format {facts['format']}, expected {FORMAT}; save the weights again")
            return _config(facts["config"])
        except BadWeights:
            raise
        except Exception as error:
            raise BadWeights(_unreadable(folder, error)) from error


def read_weights(
    folder: Path, config: ModelConfig, dtype: Any, layout: Layout, panels: bool, kept: str | None = None
) -> Any:
    """The weights (an `nnx.State`) in `dtype`, or with matrices `kept` in blocks, on the layout's devices.

    Every file is held against its digest first; many hosts divide them. Raises `BadWeights` for a damaged checkpoint.
    """
    mine = digests.damage(folder / INSIDE, share=jax.process_index(), of=jax.process_count())
    elsewhere = "another host says so" if somewhere(bool(mine)) else ""
    _check(folder, mine or elsewhere)
    wanted = nnx.to_flat_state(abstract_weights(config, dtype, panels=False))
    template = {}
    for where, leaf in wanted:
        names = tuple(map(str, where))
        sharding = layout.sharding(leaf.shape, layout.rule("/".join(names)))
        template[names] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            found = checkpointer.restore(
                folder / INSIDE, ocp.args.Composite(weights=ocp.args.StandardRestore(unflatten_dict(template)))
            )["weights"]
        except Exception as error:
            raise BadWeights(_unreadable(folder, error)) from error
    filled: list[Any] = []
    values: Any = flatten_dict(found)
    for where, leaf in wanted:
        names = tuple(map(str, where))
        value = values[names]
        if not bool(jnp.isfinite(value).all()):
            raise BadWeights(f"{folder}: {'/'.join(names)} holds NaN or infinity: the checkpoint is damaged")
        if kept is not None and value.ndim == 2:
            filled.append((where, leaf.replace(_in_blocks(where, value, config, kept, layout, panels))))
        else:
            filled.append((where, leaf.replace(_packed(names[-1], value, config) if panels else value)))
    return nnx.from_flat_state(filled)


def _plain(name: str, value: jax.Array) -> jax.Array:
    """The stored form as `[in, out]`, an embedding table as `[V, M]`."""
    if value.ndim < 3:
        return value
    return plain(value).T if name == "embed" else plain(value)


def _packed(name: str, value: jax.Array, config: ModelConfig) -> jax.Array:
    """The form that this machine's matrix products like best."""
    if value.ndim < 2:
        return value
    whole = np.asarray(value)
    return settled(packed_table(whole, config.tie_embeddings) if name == "embed" else packed(whole.T, True))


def _in_blocks(where: tuple, value: jax.Array, config: ModelConfig, kept: str, layout: Layout, panels: bool) -> Blocks:
    """The matrix `[in, out]`, or the table `[V, M]`, in blocks."""
    name = str(where[-1])
    whole = on_host(value)
    arrays = as_held(quantised(whole if name == "embed" else whole.T, kept))
    path = "/".join(map(str, where))

    def placed(array: np.ndarray) -> jax.Array:
        if panels:
            return settled(packed_table(array, config.tie_embeddings) if name == "embed" else packed(array, True))
        return layout.put(array if name == "embed" else np.ascontiguousarray(array.T), *layout.rule(path))

    found = {key: placed(array) for key, array in arrays.items()}
    return Blocks.placed(found, value.dtype)


def _config(facts: dict[str, Any]) -> ModelConfig:
    """The config from its fields as JSON has them."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    for name in ("rope", "local_rope"):
        if fields[name] is not None:
            turning: dict[str, Any] = dict(fields[name])
            fields[name] = Rope(**{**turning, "factors": tuple(turning["factors"])})
    return ModelConfig(**fields)


def _check(folder: Path, damage: str) -> None:
    """Raises `BadWeights` where there is damage."""
    if damage:
        raise BadWeights(f"{folder}: not a readable checkpoint of weights ({damage}); it is damaged, save it again")


def _unreadable(folder: Path, error: Exception) -> str:
    return (
        f"{folder}: not a readable checkpoint of weights ({type(error).__name__}: {first_line(error)}); save them again"
    )

"""Layout: which dimension of every array is divided over which devices, for one model on one mesh.

The mesh's `model` axis is split into three for the model's heads: `heads` divides the KV heads, `group` the query heads
of each KV head (whose cache is then replicated), and what neither can divide is `spare`, which divides slots as
`context` does. Llama 3 (8 KV heads, 4 queries each) on 16 devices: 8 heads x 2 group. SmolLM2 (3 KV heads, 3 queries
each) on 8: 1 x 1 x 8 spare, that is, every device has all heads for an eighth of the slots. Nothing is padded.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxkv.checks import shown
from jaxkv.errors import BadValue
from jaxkv.models import ModelConfig
from jaxkv.models.linear import settled
from jaxkv.sharding.mesh import AXES

ROWS = ("data", "fsdp")  # of the cache and of attention
TEXT = ("context",)  # of the prompt, outside attention
HEADS = ("heads",)
GROUP = ("group",)
SLOTS = ("context", "spare")
MODEL = ("heads", "group", "spare")
POOL = (*MODEL, *TEXT)  # of a pool, whose slots lie side by side, whoever's they are
Names = tuple[str, ...] | None
STORE: dict[str | None, Names] = {"rows": ROWS, "heads": HEADS, "slots": SLOTS, "pool": POOL, "line": None, None: None}

# The first pattern that a weight's path matches says what divides its dimensions ([in, out], [V, M] or [out]). Columns
# before a nonlinearity, rows behind it, so that devices sum up once per pair. qkv is divided by columns further than
# the heads can be, and its product gathered to whole heads, not by rows and summed: a sum's rounding differs by place,
# and equal keys would no longer tie exactly, as they do on one device.
ALL = (*MODEL, "fsdp")
RULES: tuple[tuple[str, tuple[Names, ...]], ...] = (
    (r"embed", (ALL, None)),
    (r"head", (None, ALL)),
    (r"layers/\d+/(qkv|gate_up)", (None, ALL)),
    (r"layers/\d+/qkv_bias", (HEADS,)),
    (r"layers/\d+/(out|down)", (ALL, None)),
    (r"(layers/\d+/)?\w*norm", (None,)),
)
ACTIVATIONS: dict[str, tuple[Names, ...]] = {
    "tokens": (("data",), TEXT),  # [B, T]
    "stream": (("data",), TEXT, None),  # [B, T, M]
    "qkv": (("data",), TEXT, ALL),  # [B, T, Hk * (G + 2) * D]
    "heads": (("data",), TEXT, HEADS, None),  # [B, T, H, D]: queries, keys, values
    "logits": (("data",), ALL),  # [B, V]
    "context": (("data",), TEXT, (*HEADS, *GROUP), None),  # [B, T, Hq, D]
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of the axes data, fsdp, heads, group, spare, context; without a mesh, one device and nothing to do."""

    mesh: Mesh | None = None

    @classmethod
    def of(cls, mesh: Mesh | None, config: ModelConfig) -> "Layout":
        """The layout of a model on a mesh whose axes are among data, fsdp, model, context. Raises `BadValue`."""
        if mesh is None:
            return cls()
        if not isinstance(mesh, Mesh):
            raise BadValue(f"mesh={shown(mesh)}: expected a mesh of jaxkv.mesh, such as jaxkv.mesh(data=2)")
        strange = [name for name in mesh.axis_names if name not in AXES]
        if strange:
            raise BadValue(
                f"mesh axis {strange[0]!r}: expected axes out of {', '.join(AXES)}, as jaxkv.mesh makes them"
            )
        present = [axis for axis in AXES if axis in mesh.axis_names]
        devices = np.transpose(mesh.devices, [mesh.axis_names.index(axis) for axis in present])
        sizes = {axis: mesh.shape.get(axis, 1) for axis in AXES}
        heads = math.gcd(config.num_kv_heads, sizes["model"])
        group = math.gcd(config.num_heads // config.num_kv_heads, sizes["model"] // heads)
        split = (sizes["data"], sizes["fsdp"], heads, group, sizes["model"] // heads // group, sizes["context"])
        return cls(Mesh(devices.reshape(split), (*ROWS, *MODEL, *TEXT), axis_types=(AxisType.Auto,) * 6))

    def size(self, names: Names) -> int:
        """Devices along these axes together."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in names or ())

    def spec(self, shape: Sequence[int], axes: Sequence[Names]) -> PartitionSpec:
        """What divides each dimension: as many of its axes, in order, as divide it without a rest."""
        found = []
        for length, names in zip(shape, axes, strict=True):
            taken: list[str] = []
            for name in names or ():
                if length and self.size((name,)) > 1 and length % self.size((*taken, name)) == 0:
                    taken.append(name)
            found.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
        return PartitionSpec(*found)

    def sharding(self, shape: Sequence[int], axes: Sequence[Names]) -> Sharding:
        """`spec` on the mesh, or the one device."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh, self.spec(shape, axes))

    def constrain(self, x: Any, *axes: Names) -> Any:
        """`x`, divided so, inside a compiled program; no axes at all: replicated."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape, axes or (None,) * x.ndim))

    @property
    def parts(self) -> int:
        """Devices that share the slots of a head, and the tokens of a prompt in attention."""
        return self.size(SLOTS)

    def lay(self, name: str, x: Any) -> Any:
        """An activation of `ACTIVATIONS`, inside a compiled program."""
        x = self.constrain(x, *ACTIVATIONS[name])
        return self.constrain(x, *ACTIVATIONS["heads"][:3]) if name == "qkv" else x  # first as the matrix makes it

    # ---- the cache

    def layer(self, layer: Any) -> Any:
        """The layer's arrays, divided by rows, heads and slots, inside a compiled program."""
        return self.each(layer, self.constrain)

    def gathered(self, layer: Any) -> Any:
        """The layer with all slots on every device along them, inside a compiled program."""
        return self.each(layer, self.constrain, whole=True)

    @staticmethod
    def axes(dims: Sequence[str | None]) -> tuple[Names, ...]:
        """What divides the dimensions of a store's array, by the names of what they count."""
        return tuple(STORE[dim] for dim in dims)

    def by_head(self, entries: Any) -> Any:
        """Entries `[B, Hk, S, ...]` with all slots on every device along them, inside a compiled program."""
        return jax.tree.map(lambda x: self.constrain(x, *self.slot_axes(x.ndim, slots=None)), entries)

    def state(self, state: Any) -> Any:
        """A `DecodeState` whose layers are divided and whose few words per row are everywhere, inside a program."""
        layers = tuple(self.layer(layer) for layer in state.cache.layers)
        state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=()))
        state = jax.tree.map(self.constrain, state)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))

    @staticmethod
    def slot_axes(ndim: int, slots: Names = SLOTS) -> tuple[Names, ...]:
        """What divides `[B, Hk]`, `[B, Hk, C]` and `[B, Hk, C, D]`."""
        return (ROWS, HEADS, slots, None)[:ndim]

    def each(self, layer: Any, place: Callable[..., Any], whole: bool = False) -> Any:
        """The store with every array placed by what divides its dimensions; `whole`: no slots."""

        def named(leaf: Any, *dims: str | None) -> Any:
            return place(leaf, *(None if whole and dim in ("slots", "pool") else STORE[dim] for dim in dims))

        return layer.each(named)

    def cache[C: Any](self, cache: C) -> C:
        """The `KVCache` on this layout's devices, wherever it was before, with slots added where the parts need it."""
        if self.mesh is None:
            if all(leaf.sharding.num_devices == 1 for leaf in jax.tree.leaves(cache)):
                return cache
            here = jax.tree.map(lambda leaf: jnp.asarray(on_host(leaf)), cache)
            return dataclasses.replace(here, tokens=cache.tokens, draws=cache.draws)
        layers = tuple(layer.divisible(self.parts) for layer in cache.layers)
        small = {name: self.put(getattr(cache, name)) for name in ("lengths", "limits", "pending")}
        return dataclasses.replace(cache, layers=self.layers(layers), **small)

    def layers(self, layers: tuple[Any, ...]) -> tuple[Any, ...]:
        """The layers' arrays on this layout's devices, divided by rows, heads and slots."""
        return tuple(self.each(layer, self.put) for layer in layers)

    def put(self, x: Any, *axes: Names) -> jax.Array:
        """The array (numpy: the same on every host) divided over the devices; no axes at all: replicated."""
        if self.mesh is None:
            return jnp.asarray(x)
        target = self.sharding(x.shape, axes or (None,) * x.ndim)
        if isinstance(x, jax.Array) and not isinstance(x, np.ndarray) and x.sharding.device_set == target.device_set:
            return jax.device_put(x, target)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self.put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        whole = np.asarray(x) if not isinstance(x, jax.Array) else on_host(x)
        return jax.make_array_from_callback(whole.shape, target, lambda index: whole[index])

    def weight(self, path: str, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
        """The weight of a path, every device reading its own part. Raises `BadValue` for a path without a rule."""
        if self.mesh is None:
            return settled(read((slice(None),) * len(shape)))
        kept: dict[tuple, np.ndarray] = {}  # devices of one host that hold the same part read it once

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            key = tuple((each.start, each.stop) for each in index)
            if key not in kept:
                kept[key] = read(index)
            return kept[key]

        return jax.make_array_from_callback(shape, self.sharding(shape, self.rule(path)), part)

    @staticmethod
    def rule(path: str) -> tuple[Names, ...]:
        """What divides the weight of a path such as "layers/3/qkv", or "layers/3/qkv#codes" of its blocks. Raises
        `BadValue` where no rule fits.
        """
        for pattern, axes in RULES:
            if re.fullmatch(pattern, path.partition("#")[0]):
                return axes
        raise BadValue(f"weight {path!r} has no rule in jaxkv/sharding/layout.py: add one that says what divides it")


ONE_DEVICE = Layout()


def on_host(x: jax.Array) -> np.ndarray:
    """The whole array as numpy on every host; a collective where other hosts hold parts of it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(x, tiled=True))

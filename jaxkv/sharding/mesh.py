"""Meshes: how many devices share the batch, the heads, the slots and the weights."""

import math
import tomllib
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from jaxkv.configs import config_files
from jaxkv.errors import BadValue, unknown

AXES = ("data", "fsdp", "model", "context")


def mesh(
    name: str | None = None,
    *,
    data: int = 1,
    model: int = 1,
    context: int = 1,
    fsdp: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of the four axes, or one of `configs/meshes` by name; over all devices of all hosts, or those given.

    `data` divides the batch; `model` the heads and the MLP's columns; `context` the slots of one sequence (and the
    prompt); `fsdp` the weights again, and the batch of the cache. Their product must be the number of devices. Raises
    `BadValue` and `UnknownName`.
    """
    sizes: dict[str, int] = dict(zip(AXES, (data, fsdp, model, context), strict=True))
    if name is not None:
        if sizes != dict.fromkeys(AXES, 1):
            raise BadValue(f"mesh {name!r} and axes besides: give the name or the axes")
        sizes |= named(name)
    devices = jax.devices() if devices is None else devices
    shape = tuple(checked(sizes, len(devices)).values())
    # neighbours on the wires where the axes fit them; an axis may also take a part of one (8 of 4 x 4)
    placed = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def named(name: str) -> dict[str, int]:
    """The axes that a file of `configs/meshes` gives. Raises `UnknownName`."""
    files = config_files("meshes")
    if name not in files:
        raise unknown("mesh", name, files)
    return tomllib.loads(files[name].read_text(encoding="utf-8"))["mesh"]


def parsed(text: str) -> dict[str, Any]:
    """The arguments of `mesh` from "data=2,model=4", or from a name of `configs/meshes`. Raises `BadValue`."""
    if "=" not in text:
        return {"name": text}
    sizes = {}
    for item in text.split(","):
        axis, _, size = (part.strip() for part in item.partition("="))
        if axis not in AXES or not size.isdecimal() or axis in sizes:
            raise BadValue(f"mesh {text!r}: expected a name, or axes such as data=2,model=4 out of {', '.join(AXES)}")
        sizes[axis] = int(size)
    return sizes


def checked(sizes: dict[str, int], count: int) -> dict[str, int]:
    """The sizes, if they are whole numbers whose product is `count` devices. Raises `BadValue`."""
    for axis, size in sizes.items():
        if axis not in AXES or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadValue(f"mesh axis {axis}={size!r}: expected a whole number of at least 1 for {', '.join(AXES)}")
    if math.prod(sizes.values()) != count:
        given = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"
        raise BadValue(
            f"mesh {given} needs {math.prod(sizes.values())} devices, but there are {count}: change the axes, or give "
            "devices="
        )
    return sizes

"""GPUs for XLA's own compiler, on a machine without one: the plugin compiles for a description of the device.

Needs `jax-cuda13-plugin` and `jax-cuda13-pjrt` (`pip install --no-deps`, of jax's version), and nothing else of CUDA.
"""

import functools
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

pytest.importorskip(
    "jax_plugins.xla_cuda13", reason="the CUDA plugin, which holds XLA's GPU compiler, is not installed"
)

CHIPS = {  # name: compute capability, multiprocessors, KiB of shared memory of a program, GiB, GB per second, MiB of L2
    "Tesla T4": ((7, 5), 40, 64, 16, 320, 4),
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 163, 80, 2039, 40),
    "NVIDIA L4": ((8, 9), 58, 99, 24, 300, 48),
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 227, 80, 3352, 50),
    "NVIDIA B200": ((10, 0), 148, 227, 180, 8000, 126),
}
H100 = "NVIDIA H100 80GB HBM3"
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared} shared_memory_per_core: {core}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: 1.6
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


@functools.cache
def device(name: str) -> Any:
    """A device that programs can be compiled for."""
    (major, minor), cores, shared, memory, bandwidth, l2 = CHIPS[name]
    target = TARGET.format(
        name=name, major=major, minor=minor, cores=cores, shared=shared * 2**10, core=(shared + 1) * 2**10,
        memory=memory * 2**30, bandwidth=bandwidth * 10**9, l2=l2 * 2**20, threads=1024 if major == 7 else 2048,
        units=64 if (major, minor) in ((7, 5), (8, 0)) else 128,
    )  # fmt: skip
    described = topologies.get_topology_desc("gpu", "cuda", target_config=target, topology="1x1x1")
    return described.devices[0]


def on(name: str, tree: Any) -> Any:
    """The same arrays, as shapes on a device."""
    there = SingleDeviceSharding(device(name))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)


def compiled(name: str, program, *args, donate: tuple[int, ...] = ()) -> str:
    """The text of a program, compiled for a device."""
    with jax.default_device(device(name)):  # Mosaic GPU asks it for its compute capability
        traced = jax.jit(program, donate_argnums=donate).trace(*on(name, args))
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()

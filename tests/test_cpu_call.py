"""Calls of compiled functions in CPU programs: the interface's words, and work shared out over threads."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")
from pallas_kernels import cpu_call, cpu_kept
from pallas_kernels.cpu_call import DATA, compiled, floats, registered, size, word

HEADER = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()


def fields(struct: str) -> list[str]:
    """The names of a struct's fields in order, each as often as it has words (two ints share one)."""
    body = re.search(rf"struct {struct} {{(.*?)}}", HEADER, re.DOTALL)
    assert body is not None
    lines = [line.split("//")[0].strip() for line in body[1].splitlines()]
    names: list[str] = []
    nested = {
        "XLA_FFI_Args": 5, "XLA_FFI_Rets": 5, "XLA_FFI_Attrs": 5, "XLA_FFI_Api_Version": 3,
        "XLA_FFI_InternalExtension": 3,
    }  # fmt: skip
    for line in filter(None, lines):
        function = re.match(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", line)
        kind, name = ("", function[1]) if function else re.match(r"(.*?)(\w+)\s*;", line).groups()
        if name == "minor_version":
            continue
        names += [name] * nested.get(kind.strip(), 1)
    return names


def test_the_words_are_where_the_header_has_them():
    """Every place that cpu_call reads or writes, in the header that comes with this jaxlib."""
    frame = fields("XLA_FFI_CallFrame")
    assert frame.index("extension_start") == cpu_call.EXTENSION
    assert (frame.index("api"), frame.index("ctx")) == (cpu_call.API, cpu_call.CONTEXT)
    assert frame.index("args") + fields("XLA_FFI_Args").index("args") == cpu_call.ARGUMENTS
    assert frame.index("rets") + fields("XLA_FFI_Rets").index("rets") == cpu_call.RESULTS
    buffer = fields("XLA_FFI_Buffer")
    assert (buffer.index("data"), buffer.index("dims")) == (cpu_call.DATA, cpu_call.SIZES)
    version = fields("XLA_FFI_Api_Version").index("major_version")
    assert fields("XLA_FFI_Metadata_Extension").index("metadata") == cpu_call.METADATA
    assert fields("XLA_FFI_Metadata").index("api_version") + version == cpu_call.METADATA_VERSION
    api = fields("XLA_FFI_Api")
    assert api.index("api_version") + version == cpu_call.API_VERSION
    assert api.index("XLA_FFI_Error_Destroy") == cpu_call.DESTROY_ERROR
    assert api.index("XLA_FFI_ThreadPool_Schedule") == cpu_call.SCHEDULE
    assert api.index("XLA_FFI_ThreadPool_NumThreads") == cpu_call.COUNT_THREADS
    assert fields("XLA_FFI_ThreadPool_Schedule_Args") == ["struct_size", "extension_start", "ctx", "task", "data"]
    assert fields("XLA_FFI_ThreadPool_NumThreads_Args") == ["struct_size", "extension_start", "ctx", "num_threads"]
    assert fields("XLA_FFI_Error_Destroy_Args") == ["struct_size", "extension_start", "error"]


def test_another_version_is_left_alone(monkeypatch):
    """Where jaxlib speaks a later major version the call is not supported, so that the reference runs."""
    monkeypatch.setattr(cpu_call, "VERSION", 1)
    with pytest.raises(NotImplementedError, match="version 1"):
        cpu_call.supported()


@compiled
def _rows(ins):
    return size(word(ins, 0), 0)


def _sum_of_squares(ins, outs, unit):
    rows, columns = size(word(ins, 0), 0), size(word(ins, 0), 1)
    total = np.float32(0)
    for column in range(columns):
        total += floats(word(word(ins, 0), DATA), (rows, columns))[unit, column] ** 2
    floats(word(word(outs, 0), DATA), (rows,))[unit] = total


@pytest.mark.some(2)
@pytest.mark.parametrize("rows", [1, 2, 97])
def test_every_unit_is_done_once(rows):
    """Hundreds of calls, one after the other and at the same time on eight devices, each over all threads."""
    name = registered(f"jaxkv_test_sum_of_squares_{rows}", _rows, _sum_of_squares)

    def step(x, _):
        total = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((rows,), jnp.float32))(x)
        return x + 0 * total[:, None], total

    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    many = jax.jit(lambda x: jax.lax.scan(step, x, length=100)[1])
    for each in [many(jax.device_put(x, device)) for device in jax.devices()]:
        np.testing.assert_allclose(each, np.broadcast_to((x**2).sum(axis=1), (100, rows)), rtol=1e-5)


PROCESS = """
import sys
import jax.numpy as jnp
from pallas_kernels import cpu_kept
from pallas_kernels.block_product.numba_cpu import block_product
def refused(*signature, **options):
    raise RuntimeError("compiled again")
if sys.argv[1] == "again":
    cpu_kept.cfunc = refused
codes, scale = jnp.ones((1, 32, 64), jnp.int8), jnp.ones((1, 1, 64), jnp.float16)
print(float(block_product(jnp.ones((1, 32)), codes, scale, None).sum()))
"""


@pytest.mark.long
def test_a_later_process_does_not_compile(tmp_path):
    """What numba compiled lies beside JAX's programs; what was damaged there is compiled anew."""

    def process(how: str) -> str:
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROCESS, how], env=env, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr

    assert process("first") == "2048.0"
    kept = sorted(tmp_path.glob(f"*{cpu_kept.SUFFIX}"))
    assert len(kept) == 2 and not list(tmp_path.glob("*.part"))  # the call, and what does a unit of its work
    assert process("again") == "2048.0"
    whole = kept[0].read_bytes()
    kept[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "compiled again" in process("again")
    assert process("first") == process("again") == "2048.0"


def test_nothing_is_kept_in_a_bucket(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for folder, expected in (("gs://bucket/cache", None), (str(tmp_path), tmp_path), (None, None)):
            jax.config.update("jax_compilation_cache_dir", folder)
            assert cpu_kept._folder() == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_threads_that_ask_at_once_get_one_function():
    jax.devices()  # until there are any, names are only noted
    with ThreadPoolExecutor(2) as pool:
        names = [pool.submit(registered, "jaxkv_test_at_once", _rows, _twice) for _ in range(2)]
    assert {name.result() for name in names} == {"jaxkv_test_at_once"}


def _twice(ins, outs, unit):
    rows = size(word(ins, 0), 0)
    floats(word(word(outs, 0), DATA), (rows,))[unit] = 2 * floats(word(word(ins, 0), DATA), (rows,))[unit]


def _thrice(ins, outs, unit):
    rows = size(word(ins, 0), 0)
    floats(word(word(outs, 0), DATA), (rows,))[unit] = 3 * floats(word(word(ins, 0), DATA), (rows,))[unit]


def test_two_functions_help_themselves():
    """Other threads help with many units, each with the function that was called."""
    twice, thrice = registered("jaxkv_test_twice", _rows, _twice), registered("jaxkv_test_thrice", _rows, _thrice)
    x = jnp.arange(4000.0)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    both = jax.jit(lambda x: [jax.ffi.ffi_call(name, shape)(x) for name in (twice, thrice)])
    for _ in range(100):
        two, three = both(x)
        np.testing.assert_array_equal(two, 2 * x)
        np.testing.assert_array_equal(three, 3 * x)

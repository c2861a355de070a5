"""Functions that numba compiles, as calls in a CPU program: the words of XLA's foreign function interface.

Pallas has no compiler for CPUs; XLA's C interface (`xla/ffi/api/c_api.h`, version 0) lets a program call any function.
It gives the function the address of a frame of machine words; here is what is needed of it, by its place there
(`tests/test_cpu_call.py` looks it up in the header), and how a call's work is shared out over XLA's own threads.
"""

import ctypes
import inspect
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from pallas_kernels.cpu_kept import address

EXTENSION, API, CONTEXT, ARGUMENTS, RESULTS = 1, 2, 3, 9, 14  # words of a frame
DATA, SIZES = 3, 5  # of a buffer
METADATA, METADATA_VERSION = 3, 3  # of the extension that asks for the version, and of where it wants it
API_VERSION, DESTROY_ERROR, SCHEDULE, COUNT_THREADS = 4, 8, 17, 18  # of the API
SHARED, BEGUN, DONE, HOLDERS, UNITS, INS, OUTS, DOING, BLOCK = range(
    9
)  # what the threads of a call share, and how many

VERSION = 0
HELP, TOLD = -1, -2  # in place of a frame's size: of such a block, and of what a function is told about itself
ITSELF, BODY = 1, 2  # of that: its own address, and that of what does a unit
KNOWN: list[np.ndarray] = []  # what functions have been told, for as long as they may run
REGISTERED: set[str] = set()
REGISTERING = threading.Lock()
OWN = "jaxkv_own_word"
WORD = ir.IntType(64)


def supported() -> None:
    """Raises `NotImplementedError` where jaxlib speaks another version of the interface, or words have not 64 bits."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    found = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", header)
    if found is None or int(found[1]) != VERSION or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise NotImplementedError(f"XLA's foreign function interface of version {VERSION}, on 64 bits")


def compiled(body: Callable | None = None, **options) -> Any:
    """`numba.njit` of the function itself, whatever checks were wrapped around it."""
    if body is None:
        return lambda body: compiled(body, **options)
    options |= {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return njit(inspect.unwrap(body), **options)


def emitted(code: Callable) -> Any:
    """`numba.extending.intrinsic`: a function by the instructions that it stands for."""
    return intrinsic(code)


@emitted
def pointer(typing, address):
    """The address as a pointer to nothing in particular."""

    def code(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), code


@emitted
def called(typing, function, argument):
    """What the function at an address gives for a word, a word."""

    def code(context, builder, signature, args):
        form = ir.FunctionType(WORD, [WORD])
        return builder.call(builder.inttoptr(args[0], form.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), code


@emitted
def did(typing, function, ins, outs, unit):
    """Let the function at an address do a unit of a call's work."""

    def code(context, builder, signature, args):
        form = ir.FunctionType(ir.VoidType(), [WORD] * 3)
        builder.call(builder.inttoptr(args[0], form.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), code


@emitted
def added(typing, address, amount):
    """Add to the word at an address, which other threads may do as well; the word before."""

    def code(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], WORD.as_pointer()), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), code


def _word(builder: Any, address: Any, index: Any) -> Any:
    """Where the machine word lies that is `index` words behind an address."""
    return builder.gep(builder.inttoptr(address, WORD.as_pointer()), [index])


@emitted
def word(typing, address, index):
    """The machine word that lies `index` words behind an address."""

    def code(context, builder, signature, args):
        return builder.load(_word(builder, *args))

    return types.intp(types.intp, types.intp), code


@emitted
def set_word(typing, address, index, value):
    """Set the machine word that lies `index` words behind an address."""

    def code(context, builder, signature, args):
        builder.store(args[2], _word(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code


@emitted
def number(typing, address):
    """The float32 number at an address."""

    def code(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()))

    return types.float32(types.intp), code


@emitted
def set_number(typing, address, value):
    """Set the float32 number at an address."""

    def code(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), code


@emitted
def size(typing, buffer, axis):
    """How long a buffer is along an axis."""

    def code(context, builder, signature, args):
        return builder.load(_word(builder, builder.load(_word(builder, args[0], WORD(SIZES))), args[1]))

    return types.intp(types.intp, types.intp), code


def _integer(builder: Any, buffer: Any, index: Any) -> Any:
    """Where a buffer's number of 32 bits lies."""
    address = builder.load(_word(builder, buffer, WORD(DATA)))
    return builder.gep(builder.inttoptr(address, ir.IntType(32).as_pointer()), [index])


@emitted
def integer(typing, buffer, index):
    """A buffer's int32 number."""

    def code(context, builder, signature, args):
        return builder.sext(builder.load(_integer(builder, *args)), WORD)

    return types.intp(types.intp, types.intp), code


@emitted
def set_integer(typing, buffer, index, value):
    """Set a buffer's int32 number."""

    def code(context, builder, signature, args):
        builder.store(builder.trunc(args[2], ir.IntType(32)), _integer(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code


@compiled
def floats(address, shape):
    """The float32 numbers at an address, as an array."""
    return carray(pointer(address), shape, np.float32)


@compiled
def asked_for_version(frame):
    """Whether XLA only asks for the interface's version, as it does once; the answer is its own."""
    asked = word(frame, EXTENSION)
    if asked == 0:
        return False
    set_word(word(asked, METADATA), METADATA_VERSION, word(word(frame, API), API_VERSION))
    return True


@emitted
def new(typing, count):
    """The address of so many bytes of memory, by Python's own function, which needs not Python's lock."""

    def code(context, builder, signature, args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WORD, [WORD]), "PyMem_RawMalloc")
        return builder.call(function, args)

    return types.intp(types.intp), code


@emitted
def free(typing, address):
    """Give the memory at an address back."""

    def code(context, builder, signature, args):
        form = ir.FunctionType(ir.VoidType(), [WORD])
        builder.call(cgutils.get_or_insert_function(builder.module, form, "PyMem_RawFree"), args)
        return context.get_dummy_value()

    return types.void(types.intp), code


@emitted
def let_others_run(typing):
    """Give the core to a thread that waits for one, where the system has POSIX's call for that."""

    def code(context, builder, signature, args):
        if os.name == "posix":
            form = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, form, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), code


def _own_word(builder: Any) -> Any:
    """A word that belongs to the compiled function itself."""
    module = builder.module
    place = module.globals.get(OWN)
    if place is None:
        place = ir.GlobalVariable(module, WORD, OWN)
        place.linkage = "internal"  # each function has a word of its own
        setattr(place, "initializer", ir.Constant(WORD, None))  # noqa: B010
    return place


@emitted
def own_word(typing):
    """The function's own word."""

    def code(context, builder, signature, args):
        return builder.load(_own_word(builder))

    return types.intp(), code


@emitted
def set_own_word(typing, value):
    """Set the function's own word."""

    def code(context, builder, signature, args):
        builder.store(args[0], _own_word(builder))
        return context.get_dummy_value()

    return types.void(types.intp), code


@compiled
def asked(frame, function, first, second):
    """Whether a function of the API, given two words, did what it was asked for."""
    given, api = new(8 * 5), word(frame, API)
    set_word(given, 0, 8 * 5)
    set_word(given, 1, 0)
    set_word(given, 2, word(frame, CONTEXT))
    set_word(given, 3, first)
    set_word(given, 4, second)
    error = called(word(api, function), given)
    if error != 0:
        set_word(given, 0, 8 * 3)
        set_word(given, 2, error)
        called(word(api, DESTROY_ERROR), given)
    free(given)
    return error == 0


@compiled
def threads(frame):
    """How many threads XLA has for this call; 1 where it has no others."""
    place = new(8)
    set_word(place, 0, 1)
    asked(frame, COUNT_THREADS, place, 0)
    found = word(place, 0)
    free(place)
    return found


@compiled
def left(block):
    """One thread fewer uses the block; the last one frees it, for a thread may come when the work is long done."""
    if added(block + 8 * HOLDERS, -1) == 1:
        free(block)


@compiled
def work(block):
    """The units of a call that nobody has begun yet, one after the other."""
    count, ins, outs, body = word(block, UNITS), word(block, INS), word(block, OUTS), word(block, DOING)
    unit = added(block + 8 * BEGUN, 1)
    while unit < count:
        did(body, ins, outs, unit)
        added(block + 8 * DONE, 1)
        unit = added(block + 8 * BEGUN, 1)


def registered(name: str, units: Callable, body: Callable) -> str:
    """The name by which programs call `body(ins, outs, unit)` for each unit of `units(ins)`, over XLA's threads.

    `ins` and `outs` are lists of buffers (`word(ins, 0)` is the first). `units` is `compiled`; `body` is not, for it is
    compiled by itself here, once. They must not fail, for nobody would hear of it. Units may run at the same time, in
    any order. Of several threads that ask for a name the first has it compiled. Raises `NotImplementedError` where
    `supported` does.
    """
    with REGISTERING:
        if name not in REGISTERED:
            _register(name, units, body)
            REGISTERED.add(name)
    return name


def _register(name: str, units: Callable, body: Callable) -> None:
    """Compile the function and make its name known to XLA, which takes a name once."""
    supported()

    def handler(frame):
        if word(frame, 0) == HELP:  # no frame: what another thread shares
            work(frame)
            left(frame)
            return 0
        if word(frame, 0) == TOLD:
            set_own_word(frame)
            return 0
        if asked_for_version(frame):
            return 0
        ins, outs = word(frame, ARGUMENTS), word(frame, RESULTS)
        count = units(ins)
        block = new(8 * BLOCK)
        helpers = min(count, threads(frame)) - 1
        set_word(block, SHARED, HELP)
        set_word(block, BEGUN, 0)
        set_word(block, DONE, 0)
        set_word(block, HOLDERS, helpers + 1)
        set_word(block, UNITS, count)
        set_word(block, INS, ins)
        set_word(block, OUTS, outs)
        set_word(block, DOING, word(own_word(), BODY))
        for _ in range(helpers):
            if not asked(frame, SCHEDULE, word(own_word(), ITSELF), block):
                left(block)
        work(block)
        while added(block + 8 * DONE, 0) < count:
            let_others_run()  # the helper that has the last unit may be waiting for this core
        left(block)
        return 0

    doing = address(f"{name}_unit", types.void(*[types.intp] * 3), inspect.unwrap(body), ())
    handling = address(name, types.intp(types.intp), inspect.unwrap(handler), (units,))
    handle = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(handling)
    known = np.array([TOLD, handling, doing], np.intp)
    KNOWN.append(known)
    handle(known.ctypes.data)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handle), platform="cpu")

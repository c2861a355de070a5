"""What numba has compiled stays in the folder of JAX's compiled programs: a later process reads it there.

numba's own caching looks at one source file and refuses what is made of parameters; a kernel here is made of several
files. So all of them name what is kept, with the versions and the CPU that it was compiled for.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import llvmlite
import llvmlite.binding as llvm
import numba
from numba import cfunc
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

SUFFIX = ".numba"
HELD: list[Any] = []  # libraries, for as long as there may be programs that call into them


def address(name: str, signature: Any, function: Callable, parts: Iterable[Callable]) -> int:
    """The address of the C function that numba makes of `function`, out of its `parts`: read where it is kept, else
    compiled and kept, as far as JAX keeps its programs.
    """
    folder = _folder()
    file = None if folder is None else folder / f"{name}-{_key(tuple(map(_file, (function, *parts))))}{SUFFIX}"
    found = None if file is None else _read(file)
    if found is None:
        code: Any = cfunc(signature, error_model="numpy")(function)
        library, symbol = code._library, code.native_name
        if file is not None:
            _write(file, symbol, library.serialize_using_object_code())
    else:
        symbol, state = found
        context: Any = cpu_target.target_context
        rtsys.initialize(context)  # the names that compiled code calls, as a compilation makes known
        library = context.codegen().unserialize_library(state)
    HELD.append(library)
    return library.get_pointer_to_function(symbol)


def _folder() -> Path | None:
    """JAX's folder of compiled programs; None where there is none, or where it is a bucket, not a folder here."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(folder) if folder and "://" not in folder else None


def _file(function: Any) -> str:
    """The source file of a function, compiled or not."""
    return inspect.getsourcefile(inspect.unwrap(getattr(function, "py_func", function))) or ""


@functools.cache
def _key(sources: tuple[str, ...]) -> str:
    """Names what these sources and all kernels' compile to, by these versions, on this CPU."""
    facts = [numba.__version__, llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    files = sorted({*map(Path, sources), *Path(__file__).parent.rglob("*.py")})
    texts = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(b"\0".join([*map(str.encode, facts), *texts])).hexdigest()[:20]


def _write(file: Path, symbol: str, state: tuple[str, str, tuple[bytes, bytes]]) -> None:
    """Keeps a library's object code and bitcode, whole or not at all; a folder that cannot be written keeps nothing."""
    name, kind, (code, shared) = state
    digest = hashlib.sha256(code + shared).hexdigest()
    head = {"symbol": symbol, "name": name, "kind": kind, "code": len(code), "digest": digest}
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}.part")
    with contextlib.suppress(OSError):
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(json.dumps(head).encode() + b"\n" + code + shared)
            os.replace(draft, file)
        finally:
            draft.unlink(missing_ok=True)


def _read(file: Path) -> tuple[str, tuple[str, str, tuple[bytes, bytes]]] | None:
    """What `_write` wrote; None where there is nothing, or it has been damaged since."""
    try:
        head, data = file.read_bytes().split(b"\n", 1)
        facts = json.loads(head)
        if hashlib.sha256(data).hexdigest() != facts["digest"]:
            return None
        code = facts["code"]
        return facts["symbol"], (facts["name"], facts["kind"], (data[:code], data[code:]))
    except (OSError, ValueError, KeyError, TypeError):
        return None

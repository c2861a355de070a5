"""Compiled programs: those that stay in a folder of the user's, and those that a process holds; both are bounded."""

import contextlib
import dataclasses
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from jaxkv.errors import BadValue
from jaxkv.folders import cache_folder

LIMIT = 2 * 2**30  # bytes
UNUSED = 30 * 24 * 3600  # seconds after which the programs of another jaxlib or CPU are removed


MOST = 256  # programs of jaxkv that a process holds; each call of a new shape or policy makes some three
SHARE = 0.5  # of the memory maps that Linux lets a process have: with none left LLVM fails, and the process dies
_HELD: list[Any] = []  # jaxkv's jitted functions
_LAST = [0]  # how many programs they held when it was last looked at
FORMS: dict[Hashable, Any] = {}  # what programs give, by what they were asked for, as far as these may be held


def held[Jitted](program: Jitted) -> Jitted:
    """The jitted function, whose programs `make_room` may forget."""
    _HELD.append(program)
    return program


def make_room() -> None:
    """Forgets jaxkv's programs where this process holds too many; what is still wanted is compiled again.

    Looks only when there are more than before: telling the memory maps takes some milliseconds.
    """
    count = _count()
    if count != _LAST[0] and crowded():
        for program in _HELD:
            program.clear_cache()
        FORMS.clear()
        count = 0
    _LAST[0] = count


def crowded(share: float = 1.0) -> bool:
    """Whether this process holds more than `MOST` programs, or `SHARE` of the memory maps that it may have, or more
    than a `share` of either."""
    return _count() > share * MOST or _maps() > share * SHARE * _most_maps()


def _count() -> int:
    return sum(program._cache_size() for program in _HELD)


def _maps() -> int:
    """The memory maps of this process; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def _most_maps() -> int:
    most = Path("/proc/sys/vm/max_map_count")
    return int(most.read_text()) if most.exists() else 65_530


@dataclasses.dataclass(frozen=True)
class Kept:
    """What lies in a folder: the number of programs, and their bytes."""

    folder: Path
    programs: int
    bytes: int


def keep_programs(folder: str | os.PathLike | None = None, *, limit: int = LIMIT) -> Path:
    """From here on JAX writes what it compiles into a folder, and later processes read it there; gives the folder.

    By default the folder is in jaxkv's cache folder (`$JAXKV_CACHE`, else `~/.cache/jaxkv`), a part of its own for each
    jaxlib and CPU; JAX itself tells programs apart by their text, flags and devices. Of what lies there now, at most
    `limit` bytes stay, those that were used last. A folder that was chosen before, as by `JAX_COMPILATION_CACHE_DIR`,
    is left as it is.
    Raises `BadValue` for a limit below 1 and a folder that is no path or cannot be written.
    """
    import jax

    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise BadValue(f"folder={folder!r}: expected a path, or None; how many bytes stay is limit=")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadValue(f"limit={limit!r}: expected bytes, at least 1; to keep nothing, do not call keep_programs")
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if chosen:
        return Path(chosen)
    target = own_folder() if folder is None else Path(folder).expanduser()
    try:
        target.mkdir(parents=True, exist_ok=True)
        if folder is None:
            _forget_unused(target)
        _forget_beyond(target, limit)  # not JAX's own bound: under it each program added reads when all were used last
    except OSError as error:
        raise BadValue(f"{target} cannot be written ({error}): give another folder, or set JAXKV_CACHE") from error
    if not os.access(target, os.W_OK):
        raise BadValue(f"{target} cannot be written: give another folder, or set JAXKV_CACHE")
    jax.config.update("jax_compilation_cache_dir", str(target))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # the small ones are many
    return target


def own_folder() -> Path:
    """Where the programs of this jaxlib on this CPU are kept."""
    from importlib.metadata import version

    return _root() / f"jaxlib-{version('jaxlib')}-{_cpu()}"


def kept() -> list[Kept]:
    """What is kept, by jaxlib and CPU."""
    root = _root()
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    sizes = [[facts.st_size for _, facts in _programs(folder)] for folder in folders]
    return [Kept(folder, len(each), sum(each)) for folder, each in zip(folders, sizes, strict=True)]


def forget_programs() -> None:
    """Removes all compiled programs that are kept."""
    shutil.rmtree(_root(), ignore_errors=True)


def _root() -> Path:
    return cache_folder() / "programs"


def _cpu() -> str:
    """Names the host's CPU by what it can do: code that was compiled for another may not run."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(errors="replace").split("\n\n")[0].splitlines()
        facts += [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _forget_unused(own: Path) -> None:
    """Removes the folders beside this one that nobody has used for long."""
    for folder in own.parent.iterdir():
        if folder == own or not folder.is_dir():
            continue
        last = max([folder.stat().st_mtime, *(_used(facts) for _, facts in _programs(folder))])
        if last < time.time() - UNUSED:
            shutil.rmtree(folder, ignore_errors=True)


def _forget_beyond(folder: Path, limit: int) -> None:
    """Removes from a folder the programs that were used longest ago, until at most `limit` bytes are left."""
    files = [(_used(facts), facts.st_size, file) for file, facts in _programs(folder)]
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > limit:
            file.unlink(missing_ok=True)


def _used(facts: os.stat_result) -> float:
    """When a program was read last, to about a day; where the system does not keep that, when it was written."""
    return max(facts.st_atime, facts.st_mtime)


def _programs(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The programs in a folder, but for those that another process removes meanwhile."""
    found = []
    for file in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):
            found.append((file, file.stat()))
    return found

"""Folders of the user's that jaxkv writes to, and the one way to write there: whole, or not at all."""

import contextlib
import errno
import glob
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxkv.errors import BadValue, HostFailure

TRIES = 16  # to put a folder in another's place, or to remove one, while others write there
FORGOTTEN = 24 * 3600.0  # seconds after which nobody writes a draft any more: its process was killed
SPARE = 2**20  # bytes besides a folder's arrays: what is written about them


def cache_folder() -> Path:
    """Where joined models and compiled programs are kept: `$JAXKV_CACHE`, else `~/.cache/jaxkv`."""
    return Path(os.environ.get("JAXKV_CACHE") or Path.home() / ".cache" / "jaxkv")


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A draft file to write, which becomes `target` at the end of the block; an error leaves the old file and no draft.

    Each draft has a name of its own, so of several that write side by side the last one's file stands there, whole.
    Drafts of processes that were killed go after a day. Raises `BadValue` where nothing can be written.
    """
    draft = _draft(target)
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _forget(target)
            yield draft
            with draft.open("rb") as file:
                os.fsync(file.fileno())  # a disk that is full says so here at the latest
            draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def check_place(target: Path) -> None:
    """Raises `BadValue` where no file can be written at this path; makes its folder."""
    with writing(target):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass


@contextlib.contextmanager
def appearing_folder(target: Path, size: int) -> Iterator[Path]:
    """As `appearing`, with a folder, which the block makes, of `size` bytes. Of many hosts all get the same draft;
    where one of them cannot write, the others get `HostFailure`.

    What libraries write beside their folder while they make it lies in a folder of the draft's own, and goes with it.
    """
    import jax

    from jaxkv.sharding.hosts import agreed, somewhere, together

    own, first = _draft(target, agreed(uuid.uuid4().hex[:12])), jax.process_index() == 0
    draft = own / target.name
    try:
        with writing(target):
            wrong = _unready(target, own, size, first)
            if somewhere(wrong is not None):
                raise wrong or HostFailure(f"{target} cannot be written: another host says why")
            yield draft
            together(f"{target}: written")
            if first:
                _put(draft, target)
            together(f"{target}: named")
    finally:
        if first:
            _remove(own)


def _unready(target: Path, own: Path, size: int, first: bool) -> OSError | None:
    """Makes the folder of the draft; why this host cannot write so many bytes there."""
    try:
        own.mkdir(parents=True, exist_ok=True)
        if first:
            _forget(target)
        free = shutil.disk_usage(own).free
    except OSError as error:
        return error
    if free < size + SPARE:
        return OSError(errno.ENOSPC, f"it takes {size / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB are free")
    return None


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raises `BadValue` for an error of the disk inside the block."""
    try:
        yield
    except OSError as error:
        raise BadValue(
            f"{target} cannot be written ({error.strerror or error}): make room there or give another path; what "
            "stood there is as it was"
        ) from error


def _remove(folder: Path) -> None:
    """Removes a folder, in which a library's threads may still be writing after an error."""
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _draft(target: Path, own: str | None = None) -> Path:
    return target.with_name(f".{target.name}.{own or uuid.uuid4().hex[:12]}.part")


def _forget(target: Path) -> None:
    """Removes drafts of the target that nobody has written to for a day."""
    for draft in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > FORGOTTEN:
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def _put(draft: Path, target: Path) -> None:
    """Names the draft `target`; what another has put there in the meantime goes."""
    for _ in range(TRIES):
        try:
            os.rename(draft, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        aside = _draft(target)
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, aside)
        with contextlib.suppress(OSError):
            os.rename(draft, target)
        shutil.rmtree(aside, ignore_errors=True)
        if not draft.exists():
            return
    raise OSError(errno.EEXIST, "others keep writing there")

"""Digests beside what is saved: a file that has changed since is found before anything reads it."""

import hashlib
import json
from pathlib import Path

from jaxkv.errors import first_line

DIGESTS = "digests.json"


def write(folder: Path) -> None:
    """Write the SHA-256 of every file of the folder into it, by its place there."""
    found = {name: _digest(folder / name) for name in _files(folder)}
    (folder / DIGESTS).write_text(json.dumps(found), encoding="utf-8")


def damage(folder: Path, *, within: str = "", share: int = 0, of: int = 1) -> str:
    """What is wrong with the files of the folder, in words; "" where all are those that were written.

    Only files whose place begins with `within` are read, and of them every `of`-th from the `share`-th on, so that many
    hosts can divide them. Which files there are is compared in any case.
    """
    try:
        said = {str(name): str(digest) for name, digest in json.loads((folder / DIGESTS).read_bytes()).items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"{DIGESTS}: {first_line(error)}"
    there = _files(folder)
    wrong = {*said} ^ {*there}
    mine = [name for name in sorted(said) if name.startswith(within)][share::of]
    wrong |= {name for name in mine if name not in wrong and _digest(folder / name) != said[name]}
    return f"{', '.join(sorted(wrong)[:3])}: other than what was written" if wrong else ""


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

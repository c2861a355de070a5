"""Copies of what was saved, with one bit flipped."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path


def flips(saved: Path, folder: Path, count: int = 0, inside: str = "") -> Iterator[Path]:
    """`count` copies of a saved folder with one bit flipped, in every file in turn (0: once in each); with `inside`, in
    those of that folder in it."""
    files = sorted(file for file in (saved / inside).rglob("*") if file.is_file() and file.stat().st_size)
    draw = random.Random(0)
    for number in range(count or len(files)):
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        file = copy / files[number % len(files)].relative_to(saved)
        data = bytearray(file.read_bytes())
        at = draw.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        file.write_bytes(data)
        yield copy

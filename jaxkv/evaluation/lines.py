"""Rows of data that the person has: JSONL files, or what a publisher keeps on the Hugging Face hub."""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxkv.errors import BadValue, first_line

Row = tuple[str, Any]  # where it stands, in words; what it holds


def rows(path: Path, limit: int | None = None) -> Iterator[Row]:
    """One row per line of a JSONL file, of its first `limit` lines. Raises `BadValue` naming the file and line."""
    if not path.is_file():
        raise BadValue(f"data set {str(path)!r}: no such file; expected a JSONL with one object per line")
    with path.open("rb") as lines:
        yield from _parsed(lines, str(path), limit)


def from_hub(repository: str, file: str, member: str = "", limit: int | None = None) -> list[Row]:
    """The rows of a file in a data set on the hub: Parquet, or the JSONL `member` of a zip."""
    where = f"{member or file} of {repository}"
    try:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(repository, file, repo_type="dataset")
    except Exception as error:  # its many errors of network, name and rights mean the same here
        raise BadValue(
            f"{where} can't be had from the hub ({type(error).__name__}: {first_line(error)}): check the network, or "
            "give the folder of its files (--data, or data = in the run)"
        ) from error
    if not member:
        return list(_parquet(path, where, limit))
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return list(_parsed(io.BytesIO(archive.read(member)), where, limit))


def file_in(folder: Path, *names: str) -> Path | None:
    """The first of these files that is in the folder; None where none is. A name may have a `*`."""
    return next((path for name in names for path in sorted(folder.glob(name))), None)


def _parsed(lines: Iterable[bytes], where: str, limit: int | None) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip() or (limit is not None and number > limit):
            continue
        at = f"{where}, line {number}"
        try:
            yield at, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise BadValue(f"{at}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
        except (ValueError, RecursionError) as error:
            told = getattr(error, "msg", first_line(error))
            raise BadValue(f"{at}: not JSON ({told}); expected one object per line") from None


def _parquet(path: str, where: str, limit: int | None) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise BadValue(f"{where} is Parquet, which needs pyarrow: pip install 'jaxkv[eval]'") from None
    found = pyarrow.parquet.read_table(path).to_pylist()
    yield from ((f"{where}, row {number}", row) for number, row in enumerate(found[:limit], 1))

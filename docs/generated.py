"""Pages that are made from the code, as files."""

from collections.abc import Mapping
from pathlib import Path


def put(folder: Path, pages: Mapping[str, str]) -> None:
    """All pages by name, in a folder that holds nothing else; files that would be the same are left alone."""
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.md"):
        if file.name not in pages:
            file.unlink()
    for name, text in pages.items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")

"""Run the notebooks at their small size and store what they print, for whoever reads them without running them.

python colab/store_outputs.py
"""

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def stored(path: Path) -> None:
    """Run a notebook but for its install cell, and write its outputs into it."""
    book = nbformat.read(path, as_version=4)
    small = nbformat.from_dict(book)
    small.cells = [cell for cell in book.cells if "install" not in cell.metadata.get("tags", [])]
    (sized,) = (cell for cell in small.cells if cell.source.startswith("SMALL = "))
    whole, sized.source = sized.source, "SMALL = True"
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(small, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute()
    sized.source = whole
    for cell in small.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.execution_count = None
    nbformat.write(book, path)
    print(path.name)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for each in sorted(FOLDER.glob("*.ipynb")):
        stored(each)

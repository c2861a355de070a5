"""What is written stands there whole or not at all, and what was damaged afterwards is not read."""

import contextlib
import resource
import shutil
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from damage import flips

import jaxkv
from jaxkv import checkpoint, digests
from jaxkv.errors import BadCheckpoint, BadValue, HostFailure, JaxkvError
from jaxkv.evaluation import results
from jaxkv.folders import appearing, appearing_folder
from jaxkv.weights import learned

FAMILY = "llama3"
FILLED = np.random.default_rng(0).integers(3, 90, 40).astype(np.int32)


@pytest.fixture(scope="module")
def caches(tiny):
    return [jaxkv.prefill(tiny(FAMILY), FILLED + n, policy=jaxkv.policy("h2o", budget=20)) for n in (0, 1)]


@pytest.fixture(scope="module")
def saved(caches, tmp_path_factory):
    return jaxkv.save(caches[0], tmp_path_factory.mktemp("saved") / "cache")


def alike(one, other) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return one.policy == other.policy and one.model == other.model and all(np.array_equal(*pair) for pair in leaves)


@contextlib.contextmanager
def full_disk(left: int):
    """No file can grow beyond so many bytes: the system refuses to write, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_flipped_bit_is_found(saved, caches, tmp_path):
    assert alike(jaxkv.restore(saved), caches[0])
    for copy in flips(saved, tmp_path, 100):
        with pytest.raises(BadCheckpoint):
            jaxkv.restore(copy)


def test_every_file_that_changed_is_named(saved, tmp_path):
    """Before anything is read of it: a byte more, a file less and one too many."""
    for change, words in (
        (lambda copy: (copy / "facts" / "metadata").write_text("{}"), "facts/metadata: other than what was written"),
        (lambda copy: (copy / "cache" / "_METADATA").unlink(), "cache/_METADATA: other"),
        (lambda copy: (copy / "more").write_text(""), "more: other"),
        (lambda copy: (copy / digests.DIGESTS).write_text("[]"), "not a readable saved cache"),
        (lambda copy: (copy / digests.DIGESTS).unlink(), "digests.json: "),
    ):
        copy = tmp_path / "copy"
        shutil.copytree(saved, copy)
        change(copy)
        with pytest.raises(BadCheckpoint, match=words):
            jaxkv.restore(copy)
        shutil.rmtree(copy)


def test_of_two_that_save_side_by_side_the_last_one_stands(caches, tmp_path, monkeypatch):
    real, place = checkpoint.written, tmp_path / "cache"

    def while_another_saves(path, **what):
        real(path, **what)
        monkeypatch.setattr(checkpoint, "written", real)
        jaxkv.save(caches[1], place)
        assert alike(jaxkv.restore(place), caches[1])

    monkeypatch.setattr(checkpoint, "written", while_another_saves)
    jaxkv.save(caches[0], place)
    assert alike(jaxkv.restore(place), caches[0])
    assert [file.name for file in tmp_path.iterdir()] == ["cache"], "nothing is left behind"


def test_a_full_disk_is_one_line(caches, tiny, tmp_path, monkeypatch):
    params = tiny(FAMILY)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2**20))
        for write in (
            lambda: jaxkv.save(caches[0], tmp_path / "cache"),
            lambda: jaxkv.save_weights(params, tmp_path / "weights"),
        ):
            with pytest.raises(BadValue, match=r"cannot be written \(it takes .* MiB, and 1.0 MiB are free\)") as told:
                write()
            assert len(str(told.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    jaxkv.save(caches[0], tmp_path / "cache")


def test_an_error_of_the_library_leaves_nothing(caches, tmp_path, monkeypatch):
    def fails(self, path, *_, **__):
        path.mkdir()
        (path / "half").write_text("half")
        raise ValueError("OUT_OF_RANGE: no space\nand pages of it")

    monkeypatch.setattr(ocp.Checkpointer, "save", fails)
    with pytest.raises(BadCheckpoint, match=r"cannot be written \(ValueError: OUT_OF_RANGE: no space\): make room"):
        jaxkv.save(caches[0], tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_the_old_file_stays(tmp_path):
    file = tmp_path / "one.json"
    results.written(file, "old")
    with full_disk(10), pytest.raises(BadValue, match=r"one\.json cannot be written .*as it was"):
        results.written(file, "new" * 10)
    with full_disk(10), pytest.raises(BadValue, match="cannot be written"):
        learned.write({"retrieval": np.ones((4, 4))}, file)
    with pytest.raises(RuntimeError), appearing(file) as draft:
        draft.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    results.written(file, "new")
    assert file.read_text() == "new"


def test_a_place_that_cannot_be(caches, tmp_path):
    (tmp_path / "file").write_text("")
    for write in (
        lambda: jaxkv.save(caches[0], tmp_path / "file" / "cache"),
        lambda: results.written(tmp_path / "file" / "one.json", ""),
        lambda: results.Store(tmp_path / "file").open({}, "model"),
    ):
        with pytest.raises(JaxkvError, match="cannot be written"):
            write()


@pytest.mark.usefixtures("unchecked")
def test_only_caches_are_saved(tmp_path):
    with pytest.raises(BadValue, match="expected a KVCache"):
        jaxkv.save({}, tmp_path / "cache")  # pyright: ignore[reportArgumentType]


def test_a_host_that_cannot_write_is_heard_by_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxkv.sharding.hosts.somewhere", lambda mine: True)
    with pytest.raises(HostFailure, match="another host says why"), appearing_folder(tmp_path / "folder", 1):
        raise AssertionError("it is not written")
    with pytest.raises(BadValue, match="MiB are free"), appearing_folder(tmp_path / "folder", 2**60):
        raise AssertionError("it is not written")
    assert list(tmp_path.iterdir()) == []

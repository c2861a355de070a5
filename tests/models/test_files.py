"""Loading files: GGUF and safetensors give the same model, and damaged ones say what is wrong."""

import json
import shutil
import struct
import sys

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf_models import writing
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv.errors import BadValue, BadWeights, MissingModel, UnknownName
from jaxkv.models import ModelConfig
from jaxkv.models.linear import LARGE_PAGE, on_large_pages
from jaxkv.models.rope import frequencies
from jaxkv.weights.tables import GGUF, HF, wanted


def same(left, right):
    """Whether two models' weights are the same, bit for bit."""
    left, right = (dict(nnx.to_flat_state(params.weights)) for params in (left, right))
    return left.keys() == right.keys() and all(np.array_equal(left[key][...], right[key][...]) for key in left)


@pytest.fixture
def folder(goldens, tmp_path):
    """A copy of a tiny model that a test may damage."""

    def copy(family="llama2"):
        target = tmp_path / family
        shutil.copytree(goldens / "tiny" / family, target)
        return target

    return copy


def change(folder, edit):
    """Rewrite the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


# GGUF ----------------------------------------------------------------------------------------------------------------


def interleaved(weight, heads):
    """The order of rows in which Llama's GGUF holds query and key: the two halves of a head take turns."""
    size = weight.shape[0] // heads
    rows = [
        head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    return weight[rows]


def write_gguf(path, config: ModelConfig, tensors, kind=None, edit=None, more=None):
    """The tiny model as GGUF."""
    name = config.family
    found = {}
    for target, layer in wanted(config):
        value = tensors[HF[name].name_of(target, layer)]
        if name == "llama" and target in ("qkv#q", "qkv#k"):
            value = interleaved(value, config.num_heads if target == "qkv#q" else config.num_kv_heads)
        if name == "gemma3" and target.endswith("norm"):
            value = value + np.float32(1)
        found[GGUF[name].name_of(target, layer)] = value
    if config.rope.scaling == "llama3":
        plain = config.rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        found["rope_freqs.weight"] = (plain / frequencies(config.rope, config.head_dim)).astype(np.float32)
    if edit is not None:
        edit(found)
    with writing(path, config) as writer:
        for key, value in (more or {}).items():
            writer.add_key_value(key, value, *types_of(value))
        for key, value in found.items():
            if kind is not None and value.ndim == 2:
                writer.add_tensor(key, gguf.quantize(value, kind), raw_dtype=kind)
            else:
                writer.add_tensor(key, value)
    return path


def types_of(value):
    """The types of a value in GGUF."""
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return kinds.ARRAY, kinds.STRING
    return (kinds.STRING if isinstance(value, str) else kinds.UINT32,)


@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2", "qwen3"])
def test_gguf_gives_what_safetensors_gives(goldens, tiny, tmp_path, family):
    params = tiny(family)
    tensors = load_file(goldens / "tiny" / family / "model.safetensors")
    ours = jaxkv.load(write_gguf(tmp_path / "model.gguf", params.config, tensors))
    assert same(ours, params)
    assert ours.config.family == params.config.family and ours.config.stop_tokens == (2,)
    np.testing.assert_allclose(
        frequencies(ours.config.rope, 16), frequencies(params.config.rope, 16), rtol=1e-6, err_msg="RoPE"
    )
    assert ours.tokenizer is None


def test_gguf_of_gemma3_has_added_the_one_to_its_norms(goldens, tiny, tmp_path):
    params = tiny("gemma3_text")
    tensors = load_file(goldens / "tiny" / "gemma3_text" / "model.safetensors")
    ours = jaxkv.load(write_gguf(tmp_path / "model.gguf", params.config, tensors))
    assert same(ours, params)


def test_quantised_gguf(goldens, tiny, tmp_path):
    params = tiny("llama2")
    tensors = load_file(goldens / "tiny" / "llama2" / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q8_0
    ours = jaxkv.load(write_gguf(tmp_path / "model.gguf", params.config, tensors, kind))
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, kind), kind) if value.ndim == 2 else value
        for name, value in tensors.items()
    }
    plain = jaxkv.load(write_gguf(tmp_path / "rounded.gguf", params.config, rounded))
    assert same(ours, plain) and not same(ours, params)


def test_truncated_gguf(goldens, tiny, tmp_path):
    tensors = load_file(goldens / "tiny" / "llama2" / "model.safetensors")
    whole = write_gguf(tmp_path / "model.gguf", tiny("llama2").config, tensors).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 10, 40, 300, 900, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:length])
        with pytest.raises(BadWeights, match=r"cut\.gguf.*truncated"):
            jaxkv.load(cut)


def test_what_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK" * 40)
    with pytest.raises(BadWeights, match="does not begin with 'GGUF'"):
        jaxkv.load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0) + bytes(40))
    with pytest.raises(BadWeights, match="version 9"):
        jaxkv.load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 40) + bytes(40))
    with pytest.raises(BadWeights, match="truncated"):
        jaxkv.load(path)


def test_gguf_tensors_that_do_not_fit(goldens, tiny, tmp_path):
    tensors = load_file(goldens / "tiny" / "llama2" / "model.safetensors")

    def edit(found):
        del found["blk.1.ffn_up.weight"]
        found["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)

    path = write_gguf(tmp_path / "model.gguf", tiny("llama2").config, tensors, edit=edit)
    with pytest.raises(BadWeights, match=r"missing blk\.1\.ffn_up\.weight; unexpected blk\.0\.attn_q_norm\.weight"):
        jaxkv.load(path)


def test_gguf_in_several_parts(goldens, tiny, tmp_path):
    """Loaded by the first, which has the metadata; each of the others has some tensors."""
    params = tiny("llama2")
    tensors = load_file(goldens / "tiny" / "llama2" / "model.safetensors")
    names = []
    write_gguf(tmp_path / "whole.gguf", params.config, tensors, edit=names.extend)
    paths = [tmp_path / f"m-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for number, path in enumerate(paths):
        keep = set(names[number::3])

        def edit(found, keep=keep):
            for name in set(found) - keep:
                del found[name]

        write_gguf(path, params.config, tensors, edit=edit, more={"split.count": 3, "split.no": number})
    assert same(jaxkv.load(paths[0]), params)
    with pytest.raises(BadWeights, match=r"m-00002-of-00003\.gguf is one of 3 parts: load the first"):
        jaxkv.load(paths[1])
    paths[2].unlink()
    with pytest.raises(MissingModel, match=r"m-00003-of-00003\.gguf is not there"):
        jaxkv.load(paths[0])


def test_gguf_blocks_that_nothing_reads(goldens, tiny, tmp_path):
    tensors = load_file(goldens / "tiny" / "llama2" / "model.safetensors")
    wide = lambda found: found.update({"output_norm.weight": found["output_norm.weight"].astype(np.float64)})  # noqa: E731
    path = write_gguf(tmp_path / "model.gguf", tiny("llama2").config, tensors, edit=wide)
    with pytest.raises(BadWeights, match=r"tensor output_norm\.weight has block format F64, which gguf .* cannot read"):
        jaxkv.load(path)


def test_a_gguf_tokenizer_that_is_not_known_is_told_before_weights_are_read(goldens, tiny, tmp_path, monkeypatch):
    tensors = load_file(goldens / "tiny" / "llama2" / "model.safetensors")
    own = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a"]}
    path = write_gguf(tmp_path / "model.gguf", tiny("llama2").config, tensors, more=own)
    monkeypatch.setattr(sys.modules["jaxkv.weights.load"], "fill", None)
    with pytest.raises(UnknownName, match="'t5'"):
        jaxkv.load(path)


# safetensors ---------------------------------------------------------------------------------------------------------


def test_bad_tensors_are_told_together(folder):
    model = folder()

    def edit(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1].copy()
        tensors["model.layers.9.odd.weight"] = np.ones(3, np.float32)
        del tensors["model.norm.weight"], tensors["model.layers.2.self_attn.k_proj.weight"]

    change(model, edit)
    with pytest.raises(BadWeights) as caught:
        jaxkv.load(model)
    told = str(caught.value)
    assert "missing model.norm.weight" in told
    assert "missing model.layers.2.self_attn.k_proj.weight" in told
    assert "unexpected model.layers.9.odd.weight" in told
    assert "model.layers.0.mlp.up_proj.weight has shape [63, 64], expected [64, 64]" in told


def test_config_of_another_size(folder):
    model = folder()
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**facts, "num_hidden_layers": 4}))
    with pytest.raises(BadWeights, match=r"missing model\.layers\.3\."):
        jaxkv.load(model)
    (model / "config.json").write_text(json.dumps({**facts, "num_hidden_layers": 2}))
    with pytest.raises(BadWeights, match=r"unexpected model\.layers\.2\."):
        jaxkv.load(model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.weight", "model.layers.1.input_layernorm.weight"])
def test_nan_and_infinity_are_found(folder, name, value):
    model = folder()

    def edit(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[5] = value

    change(model, edit)
    with pytest.raises(BadWeights, match=name):
        jaxkv.load(model)


def test_truncated_safetensors(folder):
    model = folder()
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 100, len(whole) - 5):
        file.write_bytes(whole[:length])
        with pytest.raises(BadWeights, match=r"model\.safetensors.*truncated"):
            jaxkv.load(model)


def test_integers_are_no_weights(folder):
    model = folder()
    change(model, lambda tensors: tensors.update({"model.norm.weight": np.ones(64, np.int32)}))
    with pytest.raises(BadWeights, match=r"model\.norm\.weight is I32"):
        jaxkv.load(model)


def test_several_files_with_an_index(folder, tiny):
    model = folder()
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, model / shard)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(jaxkv.load(model), tiny("llama2"))
    (model / "b.safetensors").unlink()
    with pytest.raises(BadWeights, match=r"lacks b\.safetensors"):
        jaxkv.load(model)
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadWeights, match="weight_map"):
        jaxkv.load(model)


def test_bfloat16_files_and_dtypes(folder, tiny):
    model = folder("qwen3")

    def edit(tensors):
        for name, value in tensors.items():
            tensors[name] = value.astype(ml_dtypes.bfloat16)

    change(model, edit)
    wide, narrow = jaxkv.load(model, dtype="float32"), jaxkv.load(model, dtype=jnp.bfloat16)
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    for path, leaf in nnx.to_flat_state(narrow.weights):
        assert leaf[...].dtype == (jnp.float32 if "norm" in path[-1] else jnp.bfloat16), path
    exact = np.asarray(tiny("qwen3").weights["layers"][0]["out"][...])
    np.testing.assert_array_equal(wide.weights["layers"][0]["out"][...], exact.astype(ml_dtypes.bfloat16))
    with pytest.raises(BadValue, match=r"dtype 'int8': expected float32, bfloat16 or float16"):
        jaxkv.load(model, dtype="int8")
    with pytest.raises(BadValue, match="'float33'"):
        jaxkv.load(model, dtype="float33")


def test_tied_head_in_the_file_is_left_alone(folder, tiny):
    model = folder("llama3")
    change(model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert same(jaxkv.load(model), tiny("llama3"))


def test_a_head_of_its_own_counts_more_than_the_config(folder, tiny):
    model = folder("llama3")
    own = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"][::-1].copy()})  # noqa: E731
    change(model, own)
    params = jaxkv.load(model)
    assert tiny("llama3").config.tie_embeddings and not params.config.tie_embeddings
    table = np.asarray(tiny("llama3").weights["embed"][...])
    np.testing.assert_array_equal(np.asarray(params.weights["head"][...]), table[::-1].T)


def test_a_tied_model_that_kept_the_heads_name(folder, tiny):
    """As tools write it that keep one of two names of an array."""
    model = folder("llama3")
    change(model, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert same(jaxkv.load(model), tiny("llama3"))


@pytest.mark.parametrize("family", ["llama2", "llama3"])
def test_a_model_that_was_saved_without_its_head(folder, tiny, family):
    """Its names lack the first part. A head of its own stays, as files name it."""
    model = folder(family)

    def edit(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(model, edit)
    assert same(jaxkv.load(model), tiny(family))


def test_what_float16_cannot_hold(folder):
    """Weights say so when they are loaded, what comes of them when a prompt has run."""
    model = folder("llama3")
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    large = lambda tensors: tensors.update({up: tensors[up] * 20, down: tensors[down] * 2e4})  # noqa: E731
    change(model, large)
    params = jaxkv.load(model, dtype="float16")
    prompt, policy = np.arange(9) + 3, jaxkv.policy("h2o", budget=8)
    for run in (jaxkv.generate, jaxkv.prefill):
        with pytest.raises(BadValue, match="beyond 65504, where float16 ends; load it with dtype='bfloat16'"):
            run(params, prompt, policy=policy)
    assert jaxkv.generate(jaxkv.load(model, dtype="bfloat16"), prompt, max_new_tokens=2).lengths == [2]
    change(model, lambda tensors: tensors.update({down: tensors[down] * 1e4}))
    with pytest.raises(BadValue, match=rf"tensor {down} holds .*, and float16 ends at 65504"):
        jaxkv.load(model, dtype="float16")


def test_text_part_of_a_model_for_images(folder, tiny):
    model = folder("gemma3_text")
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": facts}))

    def edit(tensors):
        for name in list(tensors):
            tensors["language_model." + name] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)

    change(model, edit)
    assert same(jaxkv.load(model), tiny("gemma3_text"))


def test_stop_tokens_of_the_generation_config(folder):
    model = folder()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert jaxkv.load(model).config.stop_tokens == (7, 2)


def test_folders_that_lack_something(folder, tmp_path):
    model = folder()
    (model / "model.safetensors").unlink()
    with pytest.raises(MissingModel, match="no \\*\\.safetensors"):
        jaxkv.load(model)
    (model / "config.json").write_text("{")
    with pytest.raises(BadValue, match=r"config\.json is not JSON"):
        jaxkv.load(model)
    (model / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnknownName, match=r"config\.json.*'rwkv'.*qwen3"):
        jaxkv.load(model)
    (model / "config.json").unlink()
    with pytest.raises(MissingModel, match=r"no config\.json"):
        jaxkv.load(model)


def test_a_mesh_of_one_device_has_plain_matrices(goldens, tiny):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    params = jaxkv.load(goldens / "tiny" / "llama2", mesh=mesh)
    for _, leaf in nnx.to_flat_state(params.weights):
        assert leaf[...].sharding.mesh == params.layout.mesh and leaf[...].sharding.is_fully_replicated
    assert params.weights["layers"][0]["qkv"][...].ndim == 2


# Params --------------------------------------------------------------------------------------------------------------


def test_params_are_a_pytree_with_a_fingerprint(goldens, tiny):
    params = tiny("llama2")
    leaves, tree = jax.tree.flatten(params)
    again = jax.tree.unflatten(tree, leaves)
    assert again.config == params.config and again.fingerprint == params.fingerprint
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert hash(tree) == hash(jax.tree.structure(again))
    assert params.fingerprint == jaxkv.load(goldens / "tiny" / "llama2", dtype=jnp.bfloat16).fingerprint
    assert len({tiny(family).fingerprint for family in ("llama2", "llama3", "qwen2", "mistral")}) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_weights_lie_on_large_pages(dtype):
    """jax takes the memory as it is, from its first byte on; small arrays are left alone."""
    large = np.arange(2**20, dtype=np.float32).reshape(1024, 1024).astype(jnp.dtype(dtype))
    placed = on_large_pages(large)
    held = jax.device_put(placed)
    np.testing.assert_array_equal(np.asarray(held), large)
    assert placed.ctypes.data % LARGE_PAGE == 0
    if jax.default_backend() == "cpu":
        assert held.unsafe_buffer_pointer() == placed.ctypes.data
    small = np.ones((8, 8), np.float32)
    assert on_large_pages(small) is small

"""weights="file": a GGUF file's own blocks, for every format, for formats that are mixed, and on whole models."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf_models import writing

import jaxkv
from jaxkv.errors import BadValue, BadWeights
from jaxkv.models import ModelConfig
from jaxkv.models.linear import Blocks, Form, as_held
from jaxkv.weights import gguf_blocks
from jaxkv.weights.tables import GGUF, shapes, wanted
from pallas_kernels.block_product.reference import numbers

TWO_LEVELS = ("Q4_K", "Q5_K", "Q6_K")
HALVES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}  # bytes where float16 numbers begin; else two from 0 on
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "eos_token_id": 2,
}  # fmt: skip
# as common files mix them: values and down in more bits in some of the layers
KINDS = {"qkv#v": ("Q6_K", "Q4_K"), "down": ("Q6_K", "Q4_K"), "embed": ("Q6_K",), "gate_up#up": ("Q5_K", "Q5_1")}
PROMPTS = [np.arange(5, 45) % 90 + 3, np.arange(9, 20) + 3]


def blocks(kind: str, outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Random blocks `[out, bytes]` with scales of a model's size."""
    draw = np.random.default_rng(seed)
    per, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = draw.integers(0, 256, (outputs, inputs // per, size), dtype=np.uint8)
    smaller = 0.002 if kind in TWO_LEVELS else 0.01
    for at in HALVES.get(kind, [0, 2]):
        half = (smaller * draw.normal(size=(outputs, inputs // per, 1))).astype(np.float16)
        data[:, :, at : at + 2] = half.view(np.uint8).reshape(*half.shape[:2], 2)
    return data.reshape(outputs, -1)


@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_blocks_mean_what_the_file_says(kind):
    """As gguf dequantises them; scales of two levels up to the rounding of their products to 16 bits."""
    data = blocks(kind, 6, 512, 0)
    want = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    own, _ = gguf_blocks.KINDS[kind]
    for form in {own, own._replace(bits=8), Form(8, 16, True)}:
        arrays = gguf_blocks.arrays(kind, data, form)
        assert arrays["codes"].dtype == (np.int8 if form.bits == 8 else np.uint8)
        assert arrays["scale"].shape == (6, 512 // form.group) and ("offset" in arrays) == form.offset
        got = np.asarray(numbers(**{name: jnp.asarray(array) for name, array in as_held(arrays).items()}, axis=-1))
        if kind not in TWO_LEVELS:
            np.testing.assert_array_equal(got, want)
        else:  # of a code's share and of the offset each
            np.testing.assert_allclose(got, want, atol=float(2**-11 * 2 * np.abs(want).max()))


def test_a_form_that_holds_several():
    forms = [gguf_blocks.KINDS[kind][0] for kind in ("Q4_K", "Q6_K")]
    assert gguf_blocks.common(forms) == Form(8, 16, True)
    assert gguf_blocks.common(forms[:1] * 3) == Form(4, 32, True)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A model whose matrices are in blocks of many kinds."""
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    config = ModelConfig.from_hf(CONFIG)
    with writing(path, config) as writer:
        for seed, (target, layer) in enumerate(wanted(config)):
            name, shape = GGUF["llama"].name_of(target, layer), shapes(config)[target]
            if len(shape) == 1:
                writer.add_tensor(name, np.ones(shape, np.float32))
                continue
            kinds = KINDS.get(target, ("Q4_K",))
            kind = kinds[(layer or 0) % len(kinds)]
            writer.add_tensor(name, blocks(kind, *shape, seed), raw_dtype=gguf.GGMLQuantizationType[kind])
    return path


def told(params, **options):
    policy = jaxkv.policy("h2o", budget=24)
    return jaxkv.generate(params, PROMPTS, policy=policy, max_new_tokens=8, stop_tokens=(), **options).tokens.tolist()


@pytest.mark.long
def test_a_model_of_mixed_blocks(file):
    """All layers are of one form, so that they can run as one loop; the tokens are those of the numbers."""
    floats, kept = jaxkv.load(file), jaxkv.load(file, weights="file")
    forms = {}
    for path, leaf in nnx.to_flat_state(kept.weights):
        value = leaf[...]
        if isinstance(value, Blocks):
            forms.setdefault(path[-1], set()).add((value.codes.dtype.name, value.codes.shape, value.scale.shape))
        else:
            assert value.ndim == 1
    assert {name: {dtype for dtype, *_ in found} for name, found in forms.items()} == {
        "embed": {"int8"}, "qkv": {"int8"}, "out": {"uint8"}, "gate_up": {"int8"}, "down": {"int8"},
    }  # fmt: skip
    assert all(len(found) == 1 for found in forms.values())
    for (_, one), (_, other) in zip(nnx.to_flat_state(kept.weights), nnx.to_flat_state(floats.weights), strict=True):
        value = one[...]
        if isinstance(value, Blocks):
            axis = -1 if value.codes.ndim == 2 and other.shape[0] == kept.config.vocab_size else -2
            got = numbers(value.codes, value.scale, value.offset, axis=axis)
            np.testing.assert_allclose(got, other[...], atol=1e-3 * float(jnp.abs(other[...]).max()))
    assert told(kept) == told(kept, scan_layers=True) == told(floats)


@pytest.mark.long
def test_over_a_mesh(file):
    mesh = jaxkv.mesh(data=2, model=4)
    assert told(jaxkv.load(file, weights="file", mesh=mesh)) == told(jaxkv.load(file, weights="file"))


def test_damage_and_other_sources(file, goldens, tmp_path):
    data = bytearray(file.read_bytes())
    tensor = jaxkv.weights.gguf_file.read_gguf(file).tensors["blk.1.ffn_gate.weight"]
    data[tensor.offset : tensor.offset + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "damaged.gguf").write_bytes(data)
    with pytest.raises(BadWeights, match=r"blk\.1\.ffn_gate\.weight holds NaN or infinity"):
        jaxkv.load(tmp_path / "damaged.gguf", weights="file")
    with pytest.raises(BadValue, match="keeps the blocks of a GGUF file"):
        jaxkv.load(goldens / "tiny" / "llama3", weights="file")


@pytest.mark.long
def test_smollm2_says_the_same(smollm2):
    """Greedy text from the stored blocks, on five prompts, is that of the file's numbers."""
    kept = jaxkv.load("smollm2-135m", weights="file")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.weights))
    assert size < 0.19 * sum(leaf.nbytes for leaf in jax.tree.leaves(smollm2.weights))
    prompts = [
        "The train leaves at seven. The ticket office opens at", "def fibonacci(n):\n", "The capital of France is",
        "Once upon a time there was a king who", "Water boils at",
    ]  # fmt: skip
    policy = jaxkv.policy("h2o", budget=64)
    for prompt in prompts:
        one, other = (
            jaxkv.generate(params, prompt, policy=policy, max_new_tokens=40, scan_layers=True)
            for params in (kept, smollm2)
        )
        assert one.text == other.text

"""GGUF files of small models, as tests write them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import gguf

from jaxkv.models import ModelConfig


@contextlib.contextmanager
def writing(path: Path, config: ModelConfig) -> Iterator[gguf.GGUFWriter]:
    """A writer that has the facts of the model; the block adds its tensors, and then the file is written."""
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""What a store takes."""

import dataclasses

import jaxkv
from jaxkv.models import ModelConfig
from jaxkv.models.rope import Rope
from jaxkv.sizes import size_of

ONE_HEAD = ModelConfig("llama", 8, 64, 8, 1, 1, 1, 64, 8192, Rope(10000.0), 1e-5, ("full",))


def bytes_of(store, slots):
    """Bytes of the keys and values of so many tokens in one head of 64 channels, in bfloat16."""
    policy = dataclasses.replace(jaxkv.policy("full"), store=store)
    return size_of(policy, ONE_HEAD, "bfloat16", [slots]).keys_values

"""Decoder-only language models: one configurable nnx decoder, and what each family makes of it."""

from jaxkv.models.config import AttentionSpec as AttentionSpec
from jaxkv.models.config import ModelConfig as ModelConfig
from jaxkv.models.config import from_hf as from_hf
from jaxkv.models.decoder import Decoder as Decoder
from jaxkv.models.decoder import abstract_weights as abstract_weights
from jaxkv.models.decoder import graphdef as graphdef
from jaxkv.models.rope import Rope as Rope

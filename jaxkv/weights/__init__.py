"""Checkpoints -> params: safetensors and GGUF, without torch."""

from jaxkv.weights.load import load as load
from jaxkv.weights.params import Params as Params

"""Weights: safetensors and GGUF -> params, one table of names per family."""

from jaxkv.weights.load import load as load
from jaxkv.weights.params import Params as Params
from jaxkv.weights.source import model_names as model_names

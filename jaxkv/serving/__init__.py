"""Serving: requests that come and go in the rows of one running batch over a bounded cache (continuous batching)."""

from jaxkv.serving.answer import Answer as Answer
from jaxkv.serving.engine import Engine as Engine

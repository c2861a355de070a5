"""Speculative decoding on the bounded cache: AASD, prompt lookup, draft models, and exact verification."""

from jaxkv.speculative.context import AASD as AASD
from jaxkv.speculative.context import PromptLookup as PromptLookup
from jaxkv.speculative.verify import Conditional as Conditional

"""Speculative decoding on the bounded cache: AASD, prompt lookup, draft models, and exact verification."""

from jaxkv.speculative.context import AASD as AASD
from jaxkv.speculative.context import PromptLookup as PromptLookup
from jaxkv.speculative.draft_model import DraftModel as DraftModel
from jaxkv.speculative.draft_model import SelfDraft as SelfDraft
from jaxkv.speculative.verify import Conditional as Conditional

"""Every score by its kind, as TOML names it."""

from jaxkv.policies.bits import NeededBits
from jaxkv.policies.by_keys import Cur, KeyDiff, LagKV, Leverage, QueryDirection, Redundancy, StretchLeverage
from jaxkv.policies.by_queries import (
    CalibratedAttention,
    Capacity,
    ExpectedAttention,
    Glimpse,
    NonCausal,
    QuestionAttention,
    ShiftingAttention,
    WindowAttention,
    WorstAttention,
)
from jaxkv.policies.combine import Maximum, Pooled, PromptFirst, Scaled, Then, Until, Weighted
from jaxkv.policies.graph import Propagated
from jaxkv.policies.patterns import Chains, Crush, Ladder, Neighbours, Place
from jaxkv.policies.recurrence import Recurrence
from jaxkv.policies.score import (
    AccumulatedAttention,
    Attention,
    AttentionValue,
    FixedPlace,
    KeyNorm,
    NormalizedAttention,
    PeakAttention,
    Random,
    Recency,
    Score,
)

KINDS: dict[str, type[Score]] = {
    part.kind: part
    for part in (
        *(Recency, Random, FixedPlace, KeyNorm, Attention, NormalizedAttention, AccumulatedAttention, AttentionValue),
        PeakAttention,
        *(KeyDiff, LagKV, Cur, Leverage, StretchLeverage, Redundancy, QueryDirection),
        *(
            ExpectedAttention,
            CalibratedAttention,
            Capacity,
            Glimpse,
            NonCausal,
            QuestionAttention,
            ShiftingAttention,
            WindowAttention,
            WorstAttention,
        ),
        *(NeededBits, Recurrence, Ladder, Place, Neighbours, Crush, Chains),
        *(Scaled, Weighted, Maximum, Then, Until, Pooled, PromptFirst, Propagated),
    )
}

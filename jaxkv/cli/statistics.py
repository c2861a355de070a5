"""What a run was like, in words and for scripts."""

import dataclasses
from typing import Any


def facts(stats: Any) -> dict[str, Any]:
    """For JSON."""
    return {**dataclasses.asdict(stats), "evicted": stats.evicted}


def size(policy: Any) -> str:
    """A policy and its size."""
    if policy.ratio is not None:
        return f"{policy.name}, ratio {policy.ratio}"
    return policy.name if policy.budget is None else f"{policy.name}, budget {policy.budget}"


def summary(policy: Any, stats: Any) -> str:
    """A line about an answer."""
    told = stats.speculation
    drafts = "" if told is None else f", {told.tokens_per_pass:.2f} tokens per pass"
    growing = "" if stats.bounded else ", growing"
    return (
        f"[{size(policy)}: {stats.seen[0]} tokens seen, {stats.kept[0]:.0f} kept, {stats.evicted[0]:.0f} evicted, "
        f"cache {stats.cache_bytes / 1e6:.1f} MB{growing}; {stats.tokens_per_second:.1f} tokens/s{drafts}]"
    )

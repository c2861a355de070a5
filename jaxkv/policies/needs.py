"""What a part reads beside positions, keys, values and its own statistics: one set of names per part."""

from collections.abc import Iterable

MASS = "mass"  # the attention mass that the phase's observing queries give
QUERIES = "queries"  # the prompt's queries: there at prefill only
OUTPUT = "output"  # the layer's output matrix
HIDDEN = "hidden"  # the norms of the prompt's hidden states
CALIBRATED = "calibrated:"


def calibrated(name: str) -> str:
    """The need of an array that `jaxkv calibrate` measures, such as "retrieval"."""
    return CALIBRATED + name


def learned_names(needs: Iterable[str]) -> tuple[str, ...]:
    """The names of the arrays of `jaxkv calibrate` among the needs, sorted."""
    return tuple(sorted(need.removeprefix(CALIBRATED) for need in needs if need.startswith(CALIBRATED)))

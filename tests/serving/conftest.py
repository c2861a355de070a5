"""Programs of an engine are compiled ahead of time, from descriptions of arrays that the shape check would refuse."""

import jaxtyping
import pytest


@pytest.fixture(scope="module", autouse=True)
def unchecked_shapes():
    """As `unchecked`, for what a module's tests share."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)

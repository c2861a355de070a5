"""An answer by itself, without an engine."""

import pytest
from letters import Letters

from jaxkv.serving.answer import Answer
from jaxkv.stop_strings import StopStrings


def made(*, stop=(), most=20):
    """An answer to five tokens."""
    return Answer(5, 5, most, (), StopStrings(stop, Letters()), False, lambda: None, lambda: True)


def ids(text):
    return Letters()(text)["input_ids"]


def test_what_was_kept_at_a_stop_string():
    """Half of the layers grow with each token and half are full: of four more tokens one is behind the string."""
    answer = made(stop=("cd",))
    answer.take(ids("a"), [], 4.0)
    answer.take(ids("bcde"), [], 6.0)
    assert answer.ended and len(answer.tokens) == 4 and answer.kept == 5.5


@pytest.mark.parametrize(("stop", "kept"), [((), 9.0), (("bc",), 7.0)])
def test_no_more_is_kept_than_was_seen(stop, kept):
    """The cache has run what came behind a stop string; the answer has not."""
    answer = made(stop=stop)
    answer.take(ids("a"), [], 5.0)
    assert answer.kept == answer.seen == 5
    answer.take(ids("bcde"), [], 9.0)
    assert answer.kept == answer.seen == kept and answer.ended == bool(stop)

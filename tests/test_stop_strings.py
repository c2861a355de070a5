"""Stop strings by themselves, in a text of letters."""

import pytest
from letters import Letters

from jaxkv.stop_strings import StopStrings


def shown(stops, text, complete=False):
    """What is shown of the text after each of its letters."""
    stop, ids = StopStrings(stops, Letters()), Letters()(text)["input_ids"]
    return [stop.text(ids[:count], complete) for count in range(1, len(ids) + 1)]


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("bc",), "abd", ["a", "a", "abd"]),  # a begun stop string waits, and comes when it was none
        (("bc",), "abbc", ["a", "a", "ab", "ab"]),
        (("bcd",), "abcbcd", ["a", "a", "a", "abc", "abc", "abc"]),
        (("bcd", "ce"), "abce", ["a", "a", "a", "ab"]),  # the longest beginning waits
        (("c",), "abc", ["a", "ab", "ab"]),
    ],
)
def test_a_begun_stop_string_is_not_shown(stops, text, expected):
    assert shown(stops, text) == expected
    assert shown(stops, text, complete=True)[-1] == expected[-1]
    assert shown(stops, "ab", complete=True) == ["a", "ab"]  # when no more comes


@pytest.mark.parametrize("stops", [("bc", "c"), ("c", "bc")])
def test_the_text_ends_before_the_first_stop_string(stops):
    """Not before the one that was asked for first, nor before the last one in the text."""
    stop, ids = StopStrings(stops, Letters()), Letters()("abcd")["input_ids"]
    assert stop.text(ids) == stop.text(ids, complete=False) == "a"
    assert stop.reached(ids) and not stop.reached(ids[:2])

"""Stop strings by themselves, in a text of letters."""

import random
import time

import pytest
from letters import Letters, Words

from jaxkv.stop_strings import Growing, StopStrings, decoded


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


def test_the_longest_beginning_of_a_stop_string_is_not_shown():
    """Of texts of few letters, in which many parts of a string are like its beginning."""
    draw = random.Random(0)
    for _ in range(3000):
        stop, text = ("".join(draw.choices("ab", k=draw.randint(1, most))) for most in (7, 12))
        if stop not in text:
            begun = max(count for count in range(len(stop)) if text.endswith(stop[:count]))
            assert StopStrings((stop,), None).shown(text, complete=False) == text[: len(text) - begun], (stop, text)


def test_long_stop_strings_are_soon_looked_for():
    """Not beginning by beginning, which takes many seconds here."""
    texts = ["".join(random.Random(seed).choices("the quick brown fox", k=100_000)) for seed in range(40)]
    stop, began = StopStrings(tuple(texts[1:]), None), time.perf_counter()
    assert len(stop.shown(texts[0], complete=False)) > 99_900 and time.perf_counter() - began < 2


@pytest.mark.parametrize("stops", [("bc", "c"), ("c", "bc")])
def test_the_text_ends_before_the_first_stop_string(stops):
    """Not before the one that was asked for first, nor before the last one in the text."""
    stop, ids = StopStrings(stops, Letters()), Letters()("abcd")["input_ids"]
    assert stop.text(ids) == stop.text(ids, complete=False) == "a"
    assert stop.reached(ids) and not stop.reached(ids[:2])


def test_a_text_goes_on_behind_another():
    """With the space that a text would begin without; of a stop string, too."""
    front, ids = tuple(Words()("xy")["input_ids"]), Words()("abcd")["input_ids"]
    assert decoded(Words(), ids) == "a b c d" and decoded(Words(), ids, front) == " a b c d"
    assert StopStrings((" a",), Words(), front).reached(ids) and not StopStrings((" a",), Words()).reached(ids)
    assert decoded(None, ids, front) == decoded(Words(), [], front) == ""


@pytest.mark.parametrize(("front", "begins"), [((), "a b"), ((88,), " a b")])
def test_growing_text_goes_on_behind_another(front, begins):
    ids, growing = Words()("ab" * 100)["input_ids"], Growing(Words(), front)
    texts = [growing.text(ids[:count]) for count in range(1, len(ids) + 1)]
    assert texts == [decoded(Words(), ids[:count], front) for count in range(1, len(ids) + 1)]
    assert texts[-1].startswith(begins) and growing._count > len(ids) // 2


def test_a_character_that_the_text_in_front_has_begun():
    """Of the text in front nothing is shown again."""

    class Bytes(Letters):
        def decode(self, tokens, **_):
            return bytes(tokens).decode(errors="replace")

    train = list("\N{STEAM LOCOMOTIVE}".encode())
    assert decoded(Bytes(), [98], [*train[-2:], 97]) == decoded(Bytes(), [98], train) == "b"
    assert decoded(Bytes(), [train[-1], 98], train[:-1]).endswith("b")

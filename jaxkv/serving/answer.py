"""What one request gets: its tokens as they come, their text, and how it ended. Any thread may read it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxkv.errors import BadValue
from jaxkv.stop_strings import Growing, StopStrings

STOP, LENGTH, CANCELLED, FAILED = "stop", "length", "cancelled", "failed"
IDLE = "nobody runs its engine; call the engine's start(), or its turn() until the answer has ended"


@dataclasses.dataclass(frozen=True)
class Chance:
    """A token's log-probability, and the likeliest tokens in its place with theirs, the best first."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Times:
    """When a request came, took its first block, gave its first token and ended, in seconds of `time.perf_counter`."""

    arrived: float
    started: float | None = None
    first: float | None = None
    ended: float | None = None


class Answer:
    """The answer to a request while it is made and afterwards.

    `tokens` as `jaxkv.generate` gives them, the stop token among them; `chances` beside them where they were asked for.
    `before` them the cache has seen the prefix and the `prompt_tokens`. `finish` is None while it runs, then "stop",
    "length", "cancelled" or "failed" (and `error` says why: a `BadValue` is the request's, others the engine's). `kept`
    is how many of the `seen` tokens the cache held at the end, on average over layers and KV heads. Iterate for pieces
    of text.
    """

    def __init__(
        self,
        prompt_tokens: int,
        seen: int,
        most: int,
        stop_tokens: Sequence[int],
        stop: StopStrings,
        tells: bool,
        wake: Callable[[], None],
        runs: Callable[[], bool],
    ):
        self.tokens: list[int] = []
        self.chances: list[Chance] = []
        self.finish: str | None = None
        self.error: BaseException | None = None
        self.prompt_tokens, self.before, self.kept = prompt_tokens, seen, 0.0
        self.times = Times(time.perf_counter())
        self.cancelled, self.tells = False, tells
        self.group: Answer = self  # the first sample of the same prompt
        self._most, self.stop_tokens, self._stop = most, frozenset(stop_tokens), stop
        self._wake, self._runs = wake, runs
        self._changed, self._watchers = threading.Condition(), []
        self._shown, self._reading = Growing(stop.tokenizer, stop.front), threading.Lock()
        self._searched = Growing(stop.tokenizer, stop.front)  # by the engine, for stop strings

    # ---- for whoever asked

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come. Raises what made the request fail, `BadValue` where nobody runs the engine."""
        shown = ""
        self._check_runs()
        while True:
            with self._changed:
                count = len(self.tokens)
                ended = self.ended
            text = self.text()
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
            if ended:
                self._raise()
                return
            with self._changed:
                self._changed.wait_for(lambda count=count: self.ended or len(self.tokens) > count)

    def wait(self, timeout: float | None = None) -> "Answer":
        """Waits until it has ended. Raises what made it fail, `TimeoutError` after so many seconds, and without these
        `BadValue` where nobody runs the engine."""
        if timeout is None:
            self._check_runs()
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended, timeout):
                goes_on = "it goes on; wait longer, or cancel() it" if self._runs() else IDLE
                raise TimeoutError(f"no answer within {timeout} s: {goes_on}")
        self._raise()
        return self

    def text(self) -> str:
        """Its text so far, without what may still change; before a stop string."""
        with self._reading:
            ended = self.ended
            return self._stop.shown(self._shown.text(list(self.tokens)), complete=ended)

    def since(self, count: int) -> tuple[str | None, list[Chance]]:
        """How it has ended, and the chances behind the first so many, both of one moment."""
        with self._changed:
            return self.finish, self.chances[count:]

    def cancel(self) -> None:
        """End it: its row is free after the chunk of steps that runs now. What it has stays."""
        self.cancelled = True
        self._wake()

    def watch(self, heard: Callable[[], None]) -> None:
        """`heard` is called after each change from now on, or at once where nothing more comes: by the engine's thread,
        so it must be quick and raise nothing."""
        with self._changed:
            self._watchers.append(heard)
            ended = self.ended
        if ended:
            heard()

    @property
    def front(self) -> tuple[int, ...]:
        """The last tokens before its own, from whose text it goes on; none where it is a text by itself."""
        return self._stop.front

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.finish is not None

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen: prefix, prompt, and all new ones but the last, which has not been run."""
        return self.before + max(len(self.tokens) - 1, 0)

    def _check_runs(self) -> None:
        if not self.ended and not self._runs():
            raise BadValue(f"an answer would never come: {IDLE}")

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    # ---- for the engine

    def started(self) -> None:
        """The first block of its prompt runs."""
        self.times = dataclasses.replace(self.times, started=time.perf_counter())

    def take(self, tokens: list[int], chances: Sequence[Chance], kept: float) -> None:
        """Some more tokens, of which those behind a stop string do not count."""
        if self.ended:
            return
        count, stopped = len(tokens), False
        if self._stop and tokens:
            stopped = self._stop.within(self._searched.text(self.tokens + tokens))
            count = self._stop.count(self.tokens, np.asarray(tokens, int)) if stopped else count
        with self._changed:
            if count and self.times.first is None:
                self.times = dataclasses.replace(self.times, first=time.perf_counter())
            self.chances.extend(chances[:count])
            self.tokens.extend(tokens[:count])
            if tokens:  # the cache may hold what came behind a stop string
                kept = self.kept + (kept - self.kept) * count / len(tokens)
            self.kept = min(kept, float(self.seen))
            if stopped or (self.tokens and self.tokens[-1] in self.stop_tokens):
                self._end(STOP)
            elif len(self.tokens) >= self._most:
                self._end(LENGTH)
            self._changed.notify_all()
        self._tell()

    def close(self, finish: str, error: BaseException | None = None) -> None:
        """End it here, if it has not ended."""
        with self._changed:
            if not self.ended:
                self.error = error
                self._end(finish)
            self._changed.notify_all()
        self._tell()

    def _end(self, finish: str) -> None:
        self.times = dataclasses.replace(self.times, ended=time.perf_counter())
        self.finish = finish

    def _tell(self) -> None:
        for heard in tuple(self._watchers):
            heard()

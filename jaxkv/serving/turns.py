"""Many hosts with one front: what each turn begins with is said by process 0, so that all run the same turns.

What a turn does depends on nothing else: tokens are the same on every host, and so is whatever the host makes of them.
"""

import base64
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.errors import BadValue, HostFailure
from jaxkv.serving.answer import Answer
from jaxkv.serving.asked import Asked
from jaxkv.sharding.hosts import Line
from jaxkv.sharding.layout import Layout

FRONT = 0  # the process that takes requests


class Turns:
    """What the front says before each turn: the requests that have come since the last one, and the answers that have
    been cancelled. Answers are known by their number, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.leads = jax.process_index() == FRONT
        self._line, self._count, self._ended = Line(), 0, False
        self._answers: dict[int, Answer] = {}

    @classmethod
    def of(cls, layout: Layout) -> "Turns | None":
        """Those of a mesh of several hosts; None for one host. Raises `BadValue` where a host has no part in it."""
        hosts = set() if layout.mesh is None else {device.process_index for device in layout.mesh.devices.flat}
        if len(hosts) < 2:
            return None
        if len(hosts) != jax.process_count():
            raise BadValue(
                f"an engine on the devices of {len(hosts)} of {jax.process_count()} processes: expected a mesh of all "
                "of them, as jaxkv.mesh makes it"
            )
        return cls()

    def say(self, works: Sequence[Asked], cancelled: Sequence[Answer]) -> None:
        """The front's next turn begins with these."""
        self._number(works)
        gone = [number for number, answer in self._answers.items() if answer in cancelled]
        self._line.say(json.dumps({"asked": [words(work) for work in works], "gone": gone}))

    def hear(self, made: Callable[..., Asked]) -> tuple[list[Asked], list[Answer]] | None:
        """What the next turn begins with; None where the front has stopped. Raises `HostFailure` where it failed."""
        said = json.loads(self._line.hear())
        if "end" in said:
            if said["end"] is not None:
                raise HostFailure(f"the front failed: {said['end']}")
            return None
        works = [made(**settings(each)) for each in said["asked"]]
        self._number(works)
        return works, [self._answers[number] for number in said["gone"]]

    def end(self, failure: str | None) -> None:
        """The front says that no more turns come; once."""
        if not self._ended:
            self._ended = True
            self._line.say(json.dumps({"end": failure}))

    @property
    def ended(self) -> bool:
        """Whether the front has said so."""
        return self._ended

    def _number(self, works: Sequence[Asked]) -> None:
        self._answers = {number: answer for number, answer in self._answers.items() if not answer.ended}
        for work in works:
            for answer in work.answers:
                self._answers[self._count] = answer
                self._count += 1


def words(work: Asked) -> dict[str, Any]:
    """A request in JSON's own types, as `settings` reads it."""
    request = work.request
    return {
        "prompt": base64.b64encode(work.prompt.astype("<i4").tobytes()).decode("ascii"),
        "samples": request.samples, "max_new_tokens": request.max_new_tokens, "seed": request.seed,
        "stop_tokens": request.stop_tokens, "stop": request.stop, **dataclasses.asdict(request.sampler),
        "budget": work.budget, "prefix": work.named, "logprobs": work.told, "draw": work.draw,
        "front": work.answers[0].front,
    }  # fmt: skip


def settings(words: dict[str, Any]) -> dict[str, Any]:
    """What the engine makes the request of."""
    return {**words, "prompt": np.frombuffer(base64.b64decode(words["prompt"]), "<i4").astype(np.int32)}

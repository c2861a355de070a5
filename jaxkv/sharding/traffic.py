"""What a compiled program sends between devices, read from its text."""

import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_CALL = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
_ARRAY = re.compile(r"(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_OPENS = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation: its kind, the shapes that it results in on a device, and whether a loop repeats it."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    looped: bool

    @property
    def bytes(self) -> int:
        """Bytes of its result on one device."""
        return sum(math.prod(shape) * _width(dtype) for dtype, shape in self.arrays)


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program (`compiled.as_text()`), in its loops and outside of them."""
    inside: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        opened = _OPENS.match(line)
        name = opened[1] if opened else name
        inside.setdefault(name, []).append(line)
    looped, todo = set(), re.findall(r"body=%?([\w.\-]+)", text)
    while todo:  # what a loop's body calls is repeated as well
        body = todo.pop()
        if body not in looped:
            looped.add(body)
            todo += [called for line in inside.get(body, ()) for called in _CALLS.findall(line)]
    found, chains = [], set()
    for name, lines in inside.items():
        for line in lines:
            call, chain = _CALL.search(line), _CHAIN.search(line)
            if call is None or (chain is not None and chain.groups() in chains):
                continue  # the start, middle and end of one that runs beside other work are written out alike
            chains |= set() if chain is None else {chain.groups()}
            found.append(Collective(call["kind"], _arrays(call), name in looped))
    return found


def _arrays(call: re.Match[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    arrays = [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(call["result"])]
    if call["start"] and call["kind"] != "all-reduce":  # (operands, results, words): the results are what arrives
        arrays = [array for array in arrays if array[1]]
        arrays = arrays[len(arrays) // 2 :]
    return tuple(arrays)


def _width(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.findall(r"\d+", dtype)[0]) // 8)

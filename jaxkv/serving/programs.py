"""The compiled programs of an engine, made ahead of time and held by it: a call that fits none of them is an error and
never a compilation.

Those of prompts that are kept whole are made before the first request. Those that other prompts wait for are made
meanwhile, and so are those that do less work for short prompts and few rows.
"""

import dataclasses
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import run
from jaxkv.policies.policy import Learned, Policy
from jaxkv.run import Layers, of_block
from jaxkv.sampling import halves
from jaxkv.serving import rows as device
from jaxkv.serving.asked import Asked, Prefix, Shapes, pseudo_width
from jaxkv.serving.drafts import Drafts
from jaxkv.serving.rows import Rows, Told
from jaxkv.sharding.layout import Layout
from jaxkv.speculative.gate import Gate
from jaxkv.speculative.rounds import Counts
from jaxkv.store import EMPTY, KVCache
from jaxkv.store.cache import repeated
from jaxkv.weights.params import Params

TOP = 20  # the likeliest tokens told beside each, where log-probabilities are asked for
AT_ONCE = min(max((os.cpu_count() or 1) // 2, 1), 4)  # programs compiled side by side; each takes several threads
APART = 4  # of a first block's sizes, every so manyth is made before the first request


@dataclasses.dataclass(frozen=True)
class Static:
    """What all programs of an engine are compiled for."""

    params: Params
    policy: Policy
    shapes: Shapes
    learned: Learned
    rows: int
    steps: int
    implementation: str | None
    scan_layers: bool
    prefixes: bool  # whether prompts may go on from stored texts
    drafts: Drafts | None = None


class Passed(NamedTuple):
    """What the blocks of a prompt have left: the layers, the logits of the last token, and what a row drafts from."""

    layers: Layers
    logits: Float[Array, "1 V"]
    drafts: Any


class Programs:
    """`block` of a prompt, `begin` a row behind it, `insert` the row among the others, a `chunk` of their decode steps,
    or of `rounds` where they draft.

    `seconds` is what making each of them took.
    """

    def __init__(self, static: Static):
        params, policy = static.params, static.policy
        self.seconds: dict[str, float] = {}
        self._static, self._made = static, {}
        self._missing: deque[tuple[Any, Callable[[], Any]]] = deque()  # some prompts wait for these
        self._better: deque[tuple[Any, Callable[[], Any]]] = deque()  # these do less work than one that is there
        self._common = {
            "config": params.config, "policy": policy, "layout": params.layout,
            "implementation": static.implementation,
        }  # fmt: skip
        self._put = params.layout.put
        self._top = 0 if static.drafts is None else static.drafts.drafter.top
        self._empty = params.layout.layers(run.empty_layers(params.config, policy, 1, params.dtype))
        self._after: dict[bool, Any] = {}  # the form of the layers behind a first block, behind a prefix or not
        self._unseen = self._put(np.zeros((1, params.config.vocab_size), bool))

    def make(self, short: Asked) -> Rows:
        """Compile what short prompts need; the rows, none of which is taken. `short` is any prompt of one block.

        On a mesh everything is compiled: its hosts run the same programs.
        """
        static = self._static
        passed, laid = self._make_blocks(short), {"layout": static.params.layout}
        begin = jax.jit(device.begin, static_argnames=("count", "drafts", "layout"))
        given = self._row_arrays(short, passed, 0)
        begin = functools.partial(begin.lower, *given, count=TOP, drafts=static.drafts, **laid)
        kept = functools.partial(jax.jit(device.kept, static_argnames="layout").lower, passed.layers, **laid)
        self._compile({"begin": begin, "kept": kept})
        row, _ = self.begin(short, passed, 0)
        rows = _many(row, static.rows, static.params.layout)
        insert = jax.jit(device.insert, donate_argnums=0, static_argnames="layout")
        insert = functools.partial(insert.lower, rows, row, self._put(np.int32(0)), **laid)
        every = functools.partial(self._steps, rows, static.rows)
        self._compile({"insert": insert, ("chunk", static.rows): every})
        later = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), rows)
        few = [(("chunk", many), functools.partial(self._steps, later, many)) for many in self._few]
        self._missing.extendleft(few[:1])  # before all others: a request alone takes its steps several times as fast
        self._better.extendleft(reversed(few[1:]))
        return rows

    def _make_blocks(self, short: Asked) -> Passed:
        """Compile the blocks that short prompts need, and note the others; what the short prompt leaves."""
        static, mesh = self._static, self._static.params.layout.mesh
        layers = self._empty if short.prefix is None else short.prefix.layers
        soon, missing, better = _parted(self._firsts(layers, prefix=short.prefix is not None), short.look)
        self._compile({**soon, **missing, **better} if mesh is not None else soon)
        passed = self._run(short, None, 0)
        self._after = dict.fromkeys((False, True), jax.tree.structure(passed.layers))
        following = self._followings(passed)
        if static.policy.store.fits:
            laid = {name: self._common[name] for name in ("config", "policy", "layout")}
            fit = jax.jit(functools.partial(run.fitted, **laid))
            self._compile({"fit": functools.partial(fit.lower, passed.layers, static.learned)})
            passed = self._fitted(passed)
            self._after[True] = jax.tree.structure(passed.layers)
            following |= self._followings(passed) if static.prefixes else {}
        if mesh is not None:
            self._compile(following)
            return passed
        near = {key: lower for key, lower in following.items() if key[-1] is short.look}
        self._missing.extend({**near, **missing, **following}.items())
        self._better.extend(better.items())
        return passed

    def _followings(self, passed: Passed) -> dict[Any, Callable[[], Any]]:
        """How to lower the programs of a block behind another one."""
        shapes, form = self._static.shapes, jax.tree.structure(passed.layers)

        def lowered(look: bool) -> Any:
            return self._lowered(run.next_block, passed.layers, self._prompt_arrays(shapes.block, look), look)

        return {("next", form, look): functools.partial(lowered, look) for look in shapes.later_looks}

    def add_missing(self, wanted: Callable[[], bool]) -> None:
        """Compile what some prompts wait for, one program after the other, as long as it is `wanted`."""
        self._rest(self._missing, wanted)

    def add_better(self, wanted: Callable[[], bool]) -> None:
        """As `add_missing`, of what does less work for short prompts and for few rows."""
        self._rest(self._better, wanted)

    def _rest(self, programs: deque[tuple[Any, Callable[[], Any]]], wanted: Callable[[], bool]) -> None:
        while programs and wanted():
            key, lower = programs[0]
            if key not in self._made:
                self._compile({key: lower})
            programs.popleft()

    def ready(self, asked: Asked) -> bool:
        """Whether the programs of this prompt are there."""
        if not self._missing:
            return True
        layers = self._empty if asked.prefix is None else asked.prefix.layers
        following = "next", self._after[asked.prefix is not None], asked.look
        later = asked.blocks.count == 0 or following in self._made
        return later and self._first(layers, asked) is not None

    @property
    def _few(self) -> tuple[int, ...]:
        """How many rows a chunk may run besides all of them: the first 1, 2, 4 and so on up to a quarter, whose caches
        are in memory a second time meanwhile. None where they lie on several devices or draft."""
        static = self._static
        if static.params.layout.mesh is not None or static.drafts is not None:
            return ()
        return tuple(2**n for n in range(static.rows.bit_length()) if 2**n <= static.rows // 4)

    def width(self, least: int) -> int:
        """How many rows a chunk runs that has to run so many: the fewest that there is a program for."""
        return next(many for many in (*self._few, self._static.rows) if many >= least and ("chunk", many) in self._made)

    def _steps(self, rows: Rows, many: int) -> Any:
        """The program of a chunk of so many rows, lowered."""
        static = self._static
        steps, ended = self._put(np.int32(0)), self._put(np.zeros(static.rows, bool))
        shared = {"room": static.steps, "count": TOP}
        if static.drafts is None:
            chunk = jax.jit(device.chunk, donate_argnums=1, static_argnames=("many", "room", "count", *self._common))
            return chunk.lower(
                static.params.weights, rows, steps, ended, learned=static.learned, many=many, **shared, **self._common
            )
        rounds = jax.jit(device.rounds, donate_argnums=1, static_argnames=("room", "count", "drafts", *self._common))
        given = self.gate(), self._put(np.float32(0)), steps, ended
        return rounds.lower(static.params.weights, rows, *given, drafts=static.drafts, **shared, **self._common)

    def add(self, prefix: Prefix) -> None:
        """Compile what prompts behind the prefix need, as far as it is not there."""
        firsts = self._firsts(prefix.layers, prefix=True)
        self._compile({key: lower for key, lower in firsts.items() if key not in self._made})

    # ---- calls

    def block(self, asked: Asked, before: Passed | None, number: int) -> Passed:
        """Block `number` of a prompt on what the one before it left (None: the first), whose layers are donated; behind
        the last one what the policy's codecs fit is fitted."""
        passed = self._run(asked, before, number)
        return self._fitted(passed) if number == asked.blocks.count and "fit" in self._made else passed

    def _fitted(self, passed: Passed) -> Passed:
        if jax.tree.structure(passed.layers) != self._after[False]:
            return passed  # behind a prefix
        return passed._replace(layers=self._made["fit"](passed.layers, self._static.learned))

    def _run(self, asked: Asked, before: Passed | None, number: int) -> Passed:
        drafts = self._static.drafts
        part = list(asked.blocks)[number]
        tokens, positions = asked.tokens[:, part], asked.positions[:, part]
        if before is None:
            layers = self._empty if asked.prefix is None else asked.prefix.layers
            key = self._first(layers, asked)
            assert key is not None, "its programs are not there"
            front = (0, 0), (key[2] - tokens.shape[1], 0)
            tokens, positions = np.pad(tokens, front), np.pad(positions, front, constant_values=EMPTY)
            text = None if drafts is None else jax.tree.map(self._put, drafts.row(asked.text))
        else:
            layers, _, text = before
            key = ("next", jax.tree.structure(layers), asked.look)
        arrays = tokens, positions, of_block(asked.pseudo, number), asked.lengths, asked.ends, asked.limits
        arrays = tuple(map(self._put, arrays))
        wanted = drafts is not None and (asked.blocks.count - number) * asked.blocks.size < drafts.columns[0]
        after, logits, expected = self._made[key](
            self._static.params.weights, layers, *arrays, self._put(np.bool_(wanted)), learned=self._static.learned
        )
        if self._top:
            text = self._made["expecting", tokens.shape[1]](text, arrays[1], expected)
        return Passed(after, logits, text)

    def _first(self, layers: Layers, asked: Asked) -> tuple[Any, ...] | None:
        """The program of a first block: the one of the smallest size that is made, if any."""
        sizes, of_layers = self._static.shapes.firsts(asked.look, asked.prefix is not None), _shape(layers)
        keys = (("first", of_layers, size, asked.look) for size in sizes if size >= asked.blocks.first)
        return next((key for key in keys if key in self._made), None)

    def begin(self, asked: Asked, passed: Passed, number: int) -> tuple[Rows, Told]:
        """The row of sample `number` behind the prompt, and its first token."""
        row, first = self._made["begin"](*self._row_arrays(asked, passed, number))
        cache = dataclasses.replace(row.state.cache, layers=passed.layers)
        return dataclasses.replace(row, state=dataclasses.replace(row.state, cache=cache)), first

    def insert(self, rows: Rows, row: Rows, at: int) -> Rows:
        """The rows, which are donated, with another one at place `at`."""
        return self._made["insert"](rows, row, self._put(np.int32(at)))

    def chunk(self, rows: Rows, ended: np.ndarray, steps: int, many: int) -> tuple[Rows, Told, Float[Array, "N"]]:
        """A chunk of `steps` decode steps of the first `many` rows (one of `widths`); all are donated. What was told,
        and what the cache of each of these holds."""
        static, count = self._static, self._put(np.int32(steps))
        return self._made["chunk", many](
            static.params.weights, rows, count, self._put(ended), learned=static.learned
        )  # fmt: skip

    def rounds(
        self, rows: Rows, gate: Gate, cost: float, ended: np.ndarray, steps: int
    ) -> tuple[Rows, Told, Float[Array, "B"], Gate, Counts]:
        """As `chunk`, for rows that draft, by the gate and what a pass over trees costs in plain steps."""
        given = gate, *map(self._put, (np.float32(cost), np.int32(steps), ended))
        return self._made["chunk", self._static.rows](self._static.params.weights, rows, *given)

    def gate(self) -> Gate:
        """A gate that has seen nothing, on the rows' devices."""
        drafts = self._static.drafts
        assert drafts is not None  # they ask for it
        return jax.tree.map(self._put, drafts.gate())

    def kept(self, layers: Layers) -> Float[Array, "1"]:
        """Tokens held behind a prompt."""
        return self._made["kept"](layers)

    # ---- making them

    def _firsts(self, layers: Layers, prefix: bool) -> dict[Any, Callable[[], Any]]:
        """How to lower the programs of a prompt's first block on these layers, from the smallest."""
        shapes, of_layers = self._static.shapes, _shape(layers)
        firsts = [(size, look) for look in (False, True) for size in shapes.firsts(look, prefix)]
        lowered: dict[Any, Callable[[], Any]] = {
            ("first", of_layers, *key): functools.partial(self._lowered_first, layers, *key) for key in firsts
        }
        if self._top:
            sizes = {shapes.block, *(size for size, _ in firsts)}
            lowered |= {("expecting", size): functools.partial(self._expecting, size) for size in sizes}
        return lowered

    def _lowered_first(self, layers: Layers, size: int, look: bool) -> Any:
        return self._lowered(run.first_block, layers, self._prompt_arrays(size, look), look)

    def _expecting(self, size: int) -> Any:
        """The program that adds what was likely in a block of so many tokens, lowered."""
        drafts = self._static.drafts
        assert drafts is not None  # they ask for it
        likely = tuple(self._put(np.zeros((1, size, self._top), dtype)) for dtype in (np.int32, np.float32))
        text = jax.tree.map(self._put, drafts.row(np.zeros(1, np.int32)))
        given, laid = (text, self._put(np.zeros((1, size), np.int32)), likely), {"layout": self._static.params.layout}
        return jax.jit(device.expecting, static_argnames=("drafts", "layout")).lower(*given, drafts=drafts, **laid)

    def _prompt_arrays(self, size: int, look: bool) -> list[np.ndarray]:
        """The arrays that `block` gives, of its shapes."""
        policy = self._static.policy
        width = pseudo_width(self._static.params, policy) if look else 0
        ints = (1, size), (1, size), (1, width), (1,), (1,), (self._static.params.config.num_layers, 1)
        return [np.zeros(shape, np.int32) for shape in ints]

    def _row_arrays(self, asked: Asked, passed: Passed, number: int) -> tuple[Any, ...]:
        static = self._static
        row = map(self._put, (asked.ends, asked.limits, np.full(1, -1, np.int32)))
        cache = KVCache((), *row, policy=static.policy, model=static.params.fingerprint)
        given = (
            np.array([asked.left], np.int32), self._unseen if asked.seen is None else asked.seen,
            halves(asked.seed), np.int32(number), asked.sampler, asked.stop, np.array([asked.told]),
        )  # fmt: skip
        return passed.logits, cache, *jax.tree.map(self._put, given), passed.drafts

    def _lowered(self, program: Any, layers: Layers, arrays: list[np.ndarray], look: bool) -> Any:
        static = self._static
        return program.lower(
            static.params.weights, layers, *map(self._put, arrays), self._put(np.bool_(False)),
            plan=static.shapes.plan(look), scan_layers=static.scan_layers, learned=static.learned, top=self._top,
            **self._common,
        )  # fmt: skip

    def _compile(self, programs: Mapping[Any, Callable[[], Any]]) -> None:
        """Make the programs, each from what lowers it."""

        def timed(lower: Callable[[], Any]) -> tuple[Any, float]:
            started = time.perf_counter()
            return lower().compile(), time.perf_counter() - started

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for key, (made, took) in zip(programs, pool.map(timed, programs.values()), strict=True):
                self._made[key] = made
                self.seconds[_name(key)] = took


def _parted(firsts: dict[Any, Callable[[], Any]], look: bool) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """The programs of a first block: those that are made before the first request, those that some prompts wait for,
    and those that do less work. Of prompts that are scored, and of those that are not, the largest and every fourth
    size below it are not among the last; those that are not scored as `look` says wait."""
    soon, missing, better = dict(firsts), {}, {}
    for of_look in (False, True):
        keys = [key for key in firsts if key[0] == "first" and key[3] is of_look]
        for below, key in enumerate(reversed(keys)):
            if below % APART:
                better[key] = soon.pop(key)
            elif of_look is not look:
                missing[key] = soon.pop(key)
    return soon, missing, better


def _many(row: Rows, count: int, layout: Layout) -> Rows:
    """So many copies of the row, none of which goes on."""
    cache = repeated(row.state.cache, count)
    state = dataclasses.replace(row.state, cache=None)
    rest = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), dataclasses.replace(row, state=state))
    state = dataclasses.replace(rest.state, cache=layout.cache(cache), done=jnp.ones(count, bool))
    many = jax.tree.map(jnp.copy, dataclasses.replace(rest, state=state))
    if layout.mesh is None:
        return many
    laid = jax.tree.map(layout.put, dataclasses.replace(many, state=dataclasses.replace(many.state, cache=None)))
    return dataclasses.replace(laid, state=dataclasses.replace(laid.state, cache=layout.cache(many.state.cache)))


def _shape(layers: Layers) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(layers)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _name(key: Any) -> str:
    """A program's name for people."""
    if isinstance(key, str):
        return key
    kind, *_, look = key
    if kind == "chunk":
        return f"chunk of {look} row{'s' * (look > 1)}"
    if kind == "expecting":
        return f"drafts beside a block of {look} tokens"
    size = f" of {key[2]} tokens" if kind == "first" else ""
    return f"{kind} block{size}, {'scored' if look else 'whole'}"

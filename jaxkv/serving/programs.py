"""The compiled programs of an engine: all of them made before the first request, and held by it.

They are compiled ahead of time, so a call that fits none of them is an error and never a compilation.
"""

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import run
from jaxkv.policies.policy import Learned, Policy
from jaxkv.run import Layers, of_block
from jaxkv.serving import rows as device
from jaxkv.serving.asked import Asked, Prefix, Shapes, pseudo_width
from jaxkv.serving.rows import Rows, Told
from jaxkv.sharding.layout import Layout
from jaxkv.store import KVCache
from jaxkv.store.cache import repeated
from jaxkv.weights.params import Params

TOP = 20  # the likeliest tokens told beside each, where log-probabilities are asked for
AT_ONCE = 4  # programs that are compiled side by side


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


class Programs:
    """`block` of a prompt, `begin` a row behind it, `insert` the row among the others, a `chunk` of their decode steps.

    `seconds` is what making each of them took.
    """

    def __init__(self, static: Static):
        params, policy = static.params, static.policy
        self.seconds: dict[str, float] = {}
        self._static, self._made = static, {}
        self._common = {
            "config": params.config, "policy": policy, "layout": params.layout,
            "implementation": static.implementation,
        }  # fmt: skip
        self._put = params.layout.put
        self._empty = params.layout.layers(run.empty_layers(params.config, policy, 1, params.dtype))
        self._unseen = self._put(np.zeros((1, params.config.vocab_size), bool))

    def make(self, short: Asked) -> Rows:
        """Compile everything; the rows, none of which is taken. `short` is any prompt of one block."""
        static, shapes = self._static, self._static.shapes
        self._compile(self._firsts(self._empty))
        layers, logits = self.block(short, None, 0)
        lowered = {}
        for look in shapes.later_looks:
            given = self._prompt_arrays(shapes.block, look)
            lowered["next", look] = self._lowered(run.next_block, layers, given, look)
        given = self._row_arrays(short, logits, 0)
        laid = {"layout": static.params.layout}
        lowered["begin"] = jax.jit(device.begin, static_argnames=("count", "layout")).lower(*given, count=TOP, **laid)
        lowered["kept"] = jax.jit(device.kept, static_argnames="layout").lower(layers, **laid)
        self._compile(lowered)
        row, _ = self.begin(short, layers, logits, 0)
        rows = _many(row, static.rows, static.params.layout)
        chunk = jax.jit(device.chunk, donate_argnums=1, static_argnames=("room", "count", *self._common))
        insert = jax.jit(device.insert, donate_argnums=0, static_argnames="layout")
        steps = self._put(np.int32(0)), self._put(np.zeros(static.rows, bool))
        self._compile(
            {
                "insert": insert.lower(rows, row, steps[0], **laid),
                "chunk": chunk.lower(
                    static.params.weights, rows, *steps, room=static.steps, count=TOP, learned=static.learned,
                    **self._common,
                ),
            }
        )  # fmt: skip
        return rows

    def add(self, prefix: Prefix) -> None:
        """Compile what prompts behind the prefix need, as far as it is not there."""
        lowered = self._firsts(prefix.layers)
        self._compile({key: value for key, value in lowered.items() if key not in self._made})

    # ---- calls

    def block(self, asked: Asked, layers: Layers | None, number: int) -> tuple[Layers, Float[Array, "1 V"]]:
        """Block `number` of a prompt on the layers that the one before it left (None: the first), which are donated."""
        key = ("next", asked.look)
        if layers is None:
            layers = self._empty if asked.prefix is None else asked.prefix.layers
            key = ("first", _shape(layers), asked.blocks.first, asked.look)
        part = list(asked.blocks)[number]
        arrays = asked.tokens[:, part], asked.positions[:, part], of_block(asked.pseudo, number)
        arrays += asked.lengths, asked.ends, asked.limits
        after, logits, _ = self._made[key](
            self._static.params.weights,
            layers,
            *map(self._put, arrays),
            self._put(np.bool_(False)),
            learned=self._static.learned,
        )
        return after, logits

    def begin(self, asked: Asked, layers: Layers, logits: Float[Array, "1 V"], number: int) -> tuple[Rows, Told]:
        """The row of sample `number` behind the prompt, and its first token."""
        row, first = self._made["begin"](*self._row_arrays(asked, logits, number))
        cache = dataclasses.replace(row.state.cache, layers=layers)
        return dataclasses.replace(row, state=dataclasses.replace(row.state, cache=cache)), first

    def insert(self, rows: Rows, row: Rows, at: int) -> Rows:
        """The rows, which are donated, with another one at place `at`."""
        return self._made["insert"](rows, row, self._put(np.int32(at)))

    def chunk(self, rows: Rows, ended: np.ndarray, steps: int) -> tuple[Rows, Told, Float[Array, "B"]]:
        """A chunk of `steps` decode steps of all rows, which are donated; what was told, and what each row's cache
        holds."""
        static, many = self._static, self._put(np.int32(steps))
        return self._made["chunk"](
            static.params.weights, rows, many, self._put(ended), learned=static.learned
        )  # fmt: skip

    def kept(self, layers: Layers) -> Float[Array, "1"]:
        """Tokens held behind a prompt."""
        return self._made["kept"](layers)

    # ---- making them

    def _firsts(self, layers: Layers) -> dict[Any, Any]:
        """The programs of a prompt's first block on these layers."""
        shapes = self._static.shapes
        return {
            ("first", _shape(layers), size, look): self._lowered(
                run.first_block, layers, self._prompt_arrays(size, look), look
            )
            for size in shapes.firsts
            for look in shapes.looks
        }

    def _prompt_arrays(self, size: int, look: bool) -> list[np.ndarray]:
        """The arrays that `block` gives, of its shapes."""
        policy = self._static.policy
        width = pseudo_width(self._static.params, policy) if look else 0
        ints = (1, size), (1, size), (1, width), (1,), (1,), (self._static.params.config.num_layers, 1)
        return [np.zeros(shape, np.int32) for shape in ints]

    def _row_arrays(self, asked: Asked, logits: Any, number: int) -> tuple[Any, ...]:
        static = self._static
        row = map(self._put, (asked.ends, asked.limits, np.full(1, -1, np.int32)))
        cache = KVCache((), *row, policy=static.policy, model=static.params.fingerprint)
        given = (
            np.array([asked.left], np.int32), self._unseen if asked.seen is None else asked.seen,
            np.int64(asked.seed), np.int32(number), asked.sampler, asked.stop, np.array([asked.told]),
        )  # fmt: skip
        return logits, cache, *jax.tree.map(self._put, given)

    def _lowered(self, program: Any, layers: Layers, arrays: list[np.ndarray], look: bool) -> Any:
        static = self._static
        return program.lower(
            static.params.weights, layers, *map(self._put, arrays), self._put(np.bool_(False)),
            plan=static.shapes.plan(look), scan_layers=static.scan_layers, learned=static.learned, **self._common,
        )  # fmt: skip

    def _compile(self, lowered: Mapping[Any, Any]) -> None:
        def timed(program: Any) -> tuple[Any, float]:
            started = time.perf_counter()
            return program.compile(), time.perf_counter() - started

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for key, (made, took) in zip(lowered, pool.map(timed, lowered.values()), strict=True):
                self._made[key] = made
                self.seconds[_name(key)] = took


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
    size = f" of {key[2]} tokens" if kind == "first" else ""
    return f"{kind} block{size}, {'scored' if look else 'whole'}"

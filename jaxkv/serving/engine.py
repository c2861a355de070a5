"""The engine: requests come and go in the rows of one running batch.

queue -> blocks of the prompt in front -> a free row -> chunks of decode steps of all rows -> tokens -> the row is free

One thread runs the turns; any thread may submit, read and cancel. A row's slots are the policy's budget whatever its
request's length, so a free row is all that a request waits for.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv.checks import check_arguments, fits, shown
from jaxkv.errors import BadCheckpoint, BadValue, Busy, JaxkvError, first_line, unknown
from jaxkv.policies.policy import Policy, check_scores
from jaxkv.prefilling import check_pass
from jaxkv.request import Request, check_model, check_platform, checked_policy, checked_request
from jaxkv.sampling import Sampler, draws_of
from jaxkv.serving.answer import CANCELLED, FAILED, Answer, Chance
from jaxkv.serving.asked import Asked, Prefix, asked, most_asked, shapes_of
from jaxkv.serving.drafts import Drafts
from jaxkv.serving.first_pass import FirstPass
from jaxkv.serving.programs import Passed, Programs, Static
from jaxkv.serving.rows import Rows, Told
from jaxkv.serving.turns import FRONT, Turns
from jaxkv.speculative.attend import check
from jaxkv.speculative.gate import Gate
from jaxkv.speculative.rounds import Counts
from jaxkv.speculative.session import Speculative
from jaxkv.speculative.tally import Speculation, Tally
from jaxkv.stop_strings import StopStrings
from jaxkv.store import KVCache
from jaxkv.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Load:
    """What an engine has to do now, and what it has done since it began; tokens are those of ended requests."""

    queued: int
    rows: int
    taken: int
    ended: Mapping[str, int]
    prompt_tokens: int
    new_tokens: int
    evicted: float


@dataclasses.dataclass
class _Reading:
    """A prompt of which some blocks have run, and then its samples that wait for a row."""

    asked: Asked
    passed: Passed | None = None
    blocks: int = 0
    rows: deque[tuple[Answer, Rows]] = dataclasses.field(default_factory=deque)


@dataclasses.dataclass(frozen=True)
class _Flying:
    """A chunk of steps that has been started, and whose the rows were; with drafts what they brought, and when it was
    started (None where other programs were to run before it)."""

    owners: tuple[Answer | None, ...]
    told: Told
    kept: Any
    counts: Counts | None = None
    began: float | None = None


class Engine:
    """Runs requests side by side, each with the tokens that `jaxkv.generate` alone gives it.

    `rows` requests run at a time and `queue` more may wait. A row has the slots that the policy needs for a prompt of
    `longest` tokens (2048, or what the model's context leaves) and `max_new_tokens` new ones: its budget, where it
    evicts while decoding, and then longer texts fit as well. Prompts run in the policy's blocks, at most `blocks` of
    them between chunks of `steps` decode steps (fewer while rows are free and prompts wait); `sizes` of a first block
    per doubling are compiled. `speculative`, such as `jaxkv.speculative.PromptLookup()`, has rows draft and verify
    together, each by its own text. It takes every policy but those that divide a budget over layers (one that looks
    ahead reads a prompt twice), and meshes that leave rows whole; on many hosts process 0 takes the requests, and the
    others `follow`. What it does not take is a `BadValue` before compilation.
    """

    def __init__(
        self,
        params: Params,
        policy: Policy | None = None,
        *,
        rows: int = 8,
        longest: int | None = None,
        max_new_tokens: int = 512,
        steps: int = 8,
        blocks: int = 4,
        queue: int = 256,
        sizes: int = 1,
        speculative: Speculative | None = None,
        implementation: str | None = None,
        scan_layers: bool = False,
    ):
        check_model(params)
        check_arguments(
            rows=rows, max_new_tokens=max_new_tokens, steps=steps, blocks=blocks, queue=queue, sizes=sizes,
            implementation=implementation, scan_layers=scan_layers,
        )  # fmt: skip
        check_platform(implementation)
        self.params, self.policy = params, checked_policy(params, policy, None)
        if longest is None:
            longest = most_asked(params, self.policy, max(max_new_tokens, FirstPass.drafted(self.policy)))
        check_arguments(longest=longest)
        self._learned = params.learned_for(self.policy.learns, self.policy.name)
        self._sizes, self._steps, self._blocks, self.queue = sizes, steps, blocks, queue
        drafts = Drafts.of(speculative, params, self.policy, rows, longest, max_new_tokens, steps)
        self.shapes = shapes_of(params, self.policy, self._learned, longest, max_new_tokens, sizes)
        static = Static(
            params, self.policy, self.shapes, self._learned, rows, steps, implementation, scan_layers,
            prefixes=True, drafts=drafts,
        )  # fmt: skip
        self._programs = Programs(static)
        self._first_pass: FirstPass | None = None  # of prompts that begin a text
        self._pass_behind: FirstPass | None = None  # of those behind a prefix
        if FirstPass.drafted(self.policy):
            self._first_pass = FirstPass(static, longest, sizes)
            self._pass_behind = FirstPass(static, longest, sizes, goes_on=True)
        self._rows: Rows | None = None
        self._tally: Tally | None = None if drafts is None else Tally(drafts.cost)
        self._gate: Gate | None = None if drafts is None else self._programs.gate()
        self._alone, self._taken = True, 0.0  # whether nothing runs before the next chunk; when the last one was read
        self._seats: list[Answer | None] = [None] * rows
        self._ended = np.zeros(rows, bool)  # rows that the host has ended and the device not yet
        self._turns = Turns.of(params.layout)
        self._asked_for: list[Asked] = []  # since the last turn began
        self._queue: deque[Asked] = deque()
        self._reading: _Reading | None = None
        self._firsts: list[tuple[Answer, Told, Any]] = []
        self._open: set[Answer] = set()
        self._flying: _Flying | None = None
        self._prefixes: dict[str, Prefix] = {}
        self._work, self._starting = threading.Condition(), threading.Lock()
        self._turning, self._making = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._compiling: threading.Thread | None = None
        self._closed, self.failure = False, None
        self._runs = False  # whether anybody has begun to run it
        self._load = Load(0, rows, 0, {}, 0, 0, 0.0)

    # ---- for whoever asks

    def warm(self) -> dict[str, float]:
        """Compile everything that requests will need; the seconds that each program took."""
        self._make()
        self._rest(lambda: True)
        passes = (each.seconds for each in (self._first_pass, self._pass_behind) if each is not None)
        return functools.reduce(operator.or_, passes, dict(self._programs.seconds))

    def _make(self) -> None:
        """Compile what short prompts need; on a mesh, whose hosts run the same programs, everything."""
        with self._turning:
            if self._rows is None:
                self._rows = self._programs.make(self._short())
                if self._turns is not None and self._first_pass is not None:
                    self._first_pass.make(self._short, lambda: True)

    def _rest(self, wanted: Callable[[], bool]) -> None:
        """Compile the other programs as long as they are `wanted`, those first that some prompts wait for."""

        def heard() -> bool:
            self._wake()
            return wanted()

        with self._making:
            self._programs.add_missing(heard)
            if self._first_pass is not None:
                self._first_pass.make(self._short, heard)
            self._wake()
            self._programs.add_better(heard)
            for each in (self._first_pass, self._pass_behind):
                if each is not None:
                    each.add_better(heard)

    def _compile_meanwhile(self) -> None:
        try:
            self._rest(lambda: not self._closed or self._waited_for())
        except BaseException as error:
            self._fail(error)
            raise

    def _short(self) -> Asked:
        return self._asked(np.zeros(1, np.int32), max_new_tokens=1)

    def _ready(self, work: Asked) -> bool:
        """Whether its programs are there."""
        before = self._pass_of(work)
        first = work.first is None or (before is not None and before.ready(work.first))
        return first and self._programs.ready(work)

    def _pass_of(self, work: Asked) -> FirstPass | None:
        """The first pass of such prompts."""
        return self._first_pass if work.prefix is None else self._pass_behind

    def submit(self, prompt: Any, **settings: Any) -> Answer:
        """Ask for one answer; its tokens are those of `jaxkv.generate(params, prompt, policy=..., **settings)`.

        Settings are `max_new_tokens`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `seed`,
        `stop_tokens`, `stop` as there; `budget`: this request's own, at most the policy's; `prefix`: the name of a
        stored text to go on from; `logprobs`: whether to tell them; `fewer`: whether fewer new tokens will do
        where so many don't fit. Raises `BadValue`, and `Busy` where the queue is full or the engine stops.
        """
        if "samples" in settings:
            raise BadValue(
                f"samples={shown(settings['samples'])} of submit: expected none, for it gives one answer; call "
                "submit_all(prompt, samples=)"
            )
        return self.submit_all(prompt, **settings)[0]

    def submit_all(self, prompt: Any, *, samples: int = 1, **settings: Any) -> tuple[Answer, ...]:
        """As `submit`, with several answers to one prompt, which is run once."""
        return self.submit_each([prompt], samples=samples, **settings)

    def submit_each(self, prompts: Sequence[Any], *, samples: int = 1, **settings: Any) -> tuple[Answer, ...]:
        """As `submit_all`, of each of several prompts: all of them are taken, or none. Equal ones draw differently, as
        those of one call of `jaxkv.generate`."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise BadValue(f"prompts={shown(prompts)}: expected a list of prompts; give one by itself to submit_all")
        known = inspect.signature(self._asked).parameters.keys() - {"prompt", "draw", "front"}
        for name in settings.keys() - known:
            raise unknown("argument of submit", name, known)
        self._check_leads()
        self._check_open()
        if len(prompts) > self.queue:
            raise BadValue(
                f"{len(prompts)} prompts in one request: expected at most {self.queue}, the queue's size; ask "
                "for fewer at once, or start it with a larger queue="
            )
        works = [self._asked(prompt, samples=samples, **settings) for prompt in prompts]
        draws = draws_of([work.text.tobytes() for work in works], samples, np.array([work.draw for work in works]))
        works = [dataclasses.replace(work, draw=int(draws[at * samples])) for at, work in enumerate(works)]
        answers = tuple(answer for work in works for answer in work.answers)
        with self._work:
            self._check_open()
            waiting = len(self._queue) + len(self._asked_for)
            if waiting + len(works) > self.queue:
                raise Busy(
                    f"{waiting} requests wait, and this engine's queue holds {self.queue}: no room for {len(works)} "
                    "more; ask again later"
                )
            self._asked_for.extend(works)
            self._open.update(answers)
            self._work.notify_all()
        return answers

    def store(self, name: str, cache: KVCache) -> None:
        """Keep a prefix, a cache of one row of `jaxkv.prefill` under this engine's policy, for requests to branch from.

        What prompts behind it need is compiled here. Raises `BadValue` and `BadCheckpoint` where it does not fit.
        """
        check_model(self.params, cache)
        checked_policy(self.params, self.policy, cache)
        if cache.policy != self.policy:
            raise BadCheckpoint(f"the cache was made under {cache.policy.name!r}, not as this engine's policy says")
        if cache.batch != 1:
            raise BadValue(f"a cache of {cache.batch} rows as prefix {name!r}: expected one row")
        if self._tally is not None:
            check(self.policy, cache)
        prefix = Prefix.of(cache)
        self._programs.add(prefix)
        if self._pass_behind is not None:
            self._pass_behind.add(dataclasses.replace(self._short(), prefix=prefix))
        self._prefixes[name] = prefix

    def forget(self, name: str) -> None:
        """Remove a stored prefix; requests that have named it go on."""
        self._prefixes.pop(name, None)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The names of the stored prefixes."""
        return tuple(self._prefixes)

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed

    @property
    def speculation(self) -> Speculation | None:
        """What drafts have brought since the engine began; None where it does not draft."""
        return None if self._tally is None else self._tally.summary()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' caches, whatever runs in them; 0 before `warm`."""
        return 0 if self._rows is None else self._rows.state.cache.nbytes

    @property
    def load(self) -> Load:
        """What there is to do, and what has been done."""
        with self._work:
            queued = len(self._queue) + len(self._asked_for) + (self._reading is not None)
        return dataclasses.replace(self._load, queued=queued, taken=sum(seat is not None for seat in self._seats))

    def start(self) -> "Engine":
        """Compile what short prompts need, and run requests in a thread of the engine's own until `stop`. The other
        programs are compiled in another thread meanwhile, and prompts that need these wait. Where it cannot, the engine
        has failed."""
        self._check_leads()
        self._runs = True
        with self._starting:
            try:
                self._make()
            except Exception as error:
                self._fail(error)
                raise
            if self._thread is None and not (self._turns is not None and self._turns.ended):
                self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
                self._compiling = threading.Thread(target=self._compile_meanwhile, name="jaxkv-programs", daemon=True)
                self._thread.start()
                self._compiling.start()
        return self

    def stop(self, *, finish: bool = True, timeout: float | None = None) -> None:
        """Take no more requests; `finish` what waits and runs (for so many seconds), then cancel what is left. A start
        under way in another thread ends first: the process must not end while it compiles."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        with self._starting:
            if self._thread is None:
                self._tell_end()
                return
        if finish:
            self._thread.join(timeout)
        for answer in self._going():
            answer.cancel()
        self._thread.join()
        if self._compiling is not None:
            self._compiling.join()

    @property
    def leads(self) -> bool:
        """Whether this process takes the requests: process 0 of a mesh of many hosts does, and the others `follow`."""
        return self._turns is None or self._turns.leads

    def follow(self) -> None:
        """On every host but process 0: run the turns of process 0's engine, until it stops.

        Raises `BadValue` on process 0, and `HostFailure` where that one fails or is gone.
        """
        if self._turns is None or self._turns.leads:
            raise BadValue(f"process {FRONT} takes the requests: start() its engine, and follow() on the other hosts")
        self._make()
        while (heard := self._turns.hear(self._asked)) is not None:
            works, cancelled = heard
            with self._turning:
                self._open.update(answer for work in works for answer in work.answers)
                self._queue.extend(works)
                self._turn(cancelled)

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop(finish=error[0] is None)

    # ---- turns

    def turn(self) -> bool:
        """One turn: blocks of the prompt in front, free rows filled, a chunk of steps; whether there is more to do.

        The next chunk is started before the last one's tokens are read, unless a prompt waits for a row to be free.
        """
        self._check_leads()
        self._runs = True
        self._make()
        if self._compiling is None:  # nobody else does
            self._rest(lambda: True)
        with self._turning:
            with self._work:
                works, self._asked_for = self._asked_for, []
                self._queue.extend(works)
                cancelled = [answer for answer in self._open if answer.cancelled]
            if self._turns is not None:
                self._turns.say(works, cancelled)
            return self._turn(cancelled)

    def _turn(self, cancelled: Sequence[Answer]) -> bool:
        """A turn, whose new requests have been queued, and which begins with the end of those that were cancelled."""
        for answer in cancelled:
            answer.close(CANCELLED)
        with self._work:
            self._queue = deque(work for work in self._queue if work.waiting)
        self._settle()
        self._read()
        before, self._flying = self._flying, None
        if self._reading is not None and self._reading.rows:
            self._take(before)
            before = None
        self._seat()
        if any(self._seats):
            self._flying = self._chunk()
        for answer, first, kept in self._firsts:
            answer.take(*_row(_Read.of(first, answer.tells), 0, answer), float(np.asarray(kept)[0]))
        self._firsts = []
        self._take(before)
        self._settle()
        return bool(self._runnable() or self._reading or self._flying or any(self._seats))

    def _read(self) -> None:
        """Run blocks of the prompt in front: one between chunks, more of them when many rows are free."""
        taken = sum(seat is not None for seat in self._seats)
        for _ in range(min(self._blocks, max(1, (len(self._seats) - taken) // max(taken, 1)))):
            if self._reading is None:
                with self._work:
                    at = next((at for at, work in enumerate(self._queue) if self._ready(work)), None)
                    if at is None:
                        return
                    work = self._queue[at]
                    del self._queue[at]
                self._reading = _Reading(work)
                for answer in work.answers:
                    answer.started()
            if self._reading.rows:
                return
            self._run_block(self._reading)

    def _run_block(self, reading: _Reading) -> None:
        """The next block of the prompt, of its first pass before; behind the last one its samples begin."""
        work = reading.asked
        if not work.waiting:
            self._reading = None
            return
        programs, part = (self._programs, work) if work.first is None else (self._pass_of(work), work.first)
        assert programs is not None  # a first pass has programs
        passed = reading.passed = programs.block(part, reading.passed, reading.blocks)
        reading.blocks += 1
        self._alone = False
        if reading.blocks <= part.blocks.count:
            return
        if isinstance(programs, FirstPass):  # now it is read, with these tokens behind it
            self._reading = _Reading(dataclasses.replace(work, pseudo=programs.ahead(part, passed), first=None))
            return
        try:
            check_pass(self.params, self.policy, passed.logits)
        except BadValue as error:
            self._reading = None
            for answer in work.answers:
                answer.close(FAILED, error)
            return
        kept = self._programs.kept(passed.layers)
        for number, answer in enumerate(work.answers, work.draw):
            row, first = self._programs.begin(work, passed, number)
            reading.rows.append((answer, row))
            self._firsts.append((answer, first, kept))

    def _seat(self) -> None:
        """Put the samples that are ready into the rows that are free."""
        reading = self._reading
        if reading is None or not reading.rows:
            return
        for at, seat in enumerate(self._seats):
            while seat is None and reading.rows:
                answer, row = reading.rows.popleft()
                if not answer.ended:
                    assert self._rows is not None  # warm
                    self._rows = self._programs.insert(self._rows, row, at)
                    self._seats[at] = seat = answer
                    self._ended[at] = self._alone = False
        if not reading.rows:
            self._reading = None

    def _chunk(self) -> _Flying:
        """Start a chunk of steps, of as few rows as all requests lie in; a shorter one while prompts wait for rows that
        are free, for steps of more rows cost less for each."""
        assert self._rows is not None  # warm
        taken = [at for at, seat in enumerate(self._seats) if seat is not None]
        many = self._programs.width(max(taken, default=0) + 1)
        owners, ended, alone = tuple(self._seats[:many]), self._ended.copy(), self._alone
        self._ended[:many], self._alone = False, True
        steps = self._steps
        if self._queue or self._reading is not None:
            steps = max(1, steps * len(taken) // len(self._seats))
        if self._tally is None or self._gate is None:
            self._rows, told, kept = self._programs.chunk(self._rows, ended, steps, many)
            return _Flying(owners, told, kept)
        measures = alone and self._turns is None  # hosts would measure different costs, and run different programs
        began = time.perf_counter() if measures else None
        self._rows, told, kept, self._gate, counts = self._programs.rounds(
            self._rows, self._gate, self._tally.cost, ended, steps
        )
        return _Flying(owners, told, kept, counts, began)

    def _take(self, flying: _Flying | None) -> None:
        """Read what a chunk of steps gave, and free the rows whose answers have ended."""
        if flying is None:
            return
        check_scores(self.policy)
        kept = np.asarray(flying.kept)
        going = [(at, answer) for at, answer in enumerate(flying.owners) if answer is not None and not answer.ended]
        read = _Read.of(flying.told, any(answer.tells for _, answer in going))
        if flying.counts is not None and self._tally is not None:
            now, before = time.perf_counter(), self._taken
            self._tally.add(flying.counts, None if flying.began is None else now - max(flying.began, before))
            self._taken = now
        for at, answer in going:
            answer.take(*_row(read, at, answer), float(kept[at]))
        self._settle()

    def _settle(self) -> None:
        """Rows of ended requests are free, and what they brought is counted."""
        for at, answer in enumerate(self._seats):
            if answer is not None and answer.ended:
                self._seats[at], self._ended[at] = None, True
        for answer in (answer for answer in self._going() if answer.ended):
            with self._work:
                self._open.discard(answer)
            load, finish = self._load, str(answer.finish)
            self._load = dataclasses.replace(
                load,
                ended={**load.ended, finish: load.ended.get(finish, 0) + 1},
                prompt_tokens=load.prompt_tokens + (answer.prompt_tokens if answer.group is answer else 0),
                new_tokens=load.new_tokens + len(answer.tokens),
                evicted=load.evicted + (answer.seen - answer.kept if answer.tokens else 0),
            )

    # ---- the thread

    def _run(self) -> None:
        try:
            while True:
                more = self.turn()
                with self._work:
                    if not more:
                        self._work.wait_for(self._has_work)
                    if self._closed and not self._waited_for() and not more:
                        break
            self._tell_end()
        except BaseException as error:
            self._fail(error)
            raise

    def _runnable(self) -> bool:
        """Whether a request waits whose programs are there."""
        return bool(self._asked_for) or any(map(self._ready, self._queue))

    def _has_work(self) -> bool:
        """Whether a turn would do anything when nothing runs."""
        cancelled = any(answer.cancelled for answer in self._open)
        return self._runnable() or cancelled or (self._closed and not self._waited_for())

    def _waited_for(self) -> bool:
        """Whether somebody waits for a request that has not begun."""
        with self._work:
            return any(work.waiting for work in (*self._asked_for, *self._queue))

    def _fail(self, error: BaseException) -> None:
        """Nobody waits for an engine that cannot go on."""
        with self._work:
            self._closed, self.failure = True, error
            self._work.notify_all()
        ends = JaxkvError(f"the engine failed: {type(error).__name__}: {error}")
        ends.__cause__ = error
        for answer in self._going():
            answer.close(FAILED, ends)
        self._settle()
        if self._turns is not None:
            with contextlib.suppress(RuntimeError):  # the others may be what failed
                self._turns.end(f"{type(error).__name__}: {first_line(error)}")

    def _tell_end(self) -> None:
        """No more turns come, as the other hosts then know."""
        if self._turns is not None and self._turns.leads and not self._turns.ended:
            self._make()  # they are on their way there
            self._turns.end(None)

    def _going(self) -> tuple[Answer, ...]:
        """The answers that have not been counted as ended."""
        with self._work:
            return tuple(self._open)

    def _wake(self) -> None:
        with self._work:
            self._work.notify_all()

    def _check_leads(self) -> None:
        if not self.leads:
            raise BadValue(
                f"process {FRONT} of this mesh takes the requests; this is another one: call follow() here, which runs "
                "what that one says"
            )

    def _check_open(self) -> None:
        if self.failure is not None:
            raise Busy(f"the engine has failed ({type(self.failure).__name__}: {self.failure}): start another one")
        if self._closed:
            raise Busy("the engine stops and takes no more requests: ask another one")

    # ---- requests

    def _asked(
        self,
        prompt: Any,
        *,
        samples: int = 1,
        max_new_tokens: int = 128,
        fewer: bool = False,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        budget: int | None = None,
        prefix: str | None = None,
        logprobs: bool = False,
        draw: int | None = None,
        front: Sequence[int] | None = None,
    ) -> Asked:
        """The request, checked and made ready in the asking thread; `draw`: see `Asked`, None where it is the first of
        its text. `front`: see `Answer`, None where the prompt says it: what another host hears of is token ids."""
        for name, given in {"logprobs": logprobs, "fewer": fewer}.items():
            if not fits(given, bool):
                raise BadValue(f"{name}={shown(given)}: expected True or False")
        if budget is not None:
            check_arguments(budget=budget)
            budget = int(budget)
        stored, first = None, 0
        if prefix is not None:
            stored = self._prefixes.get(prefix) if fits(prefix, str) else None
            if stored is None:
                raise unknown("prefix", prefix if isinstance(prefix, str) else shown(prefix), self._prefixes)
            first = stored.draws
        request = checked_request(
            self.params, prompt, None, policy=self.policy, max_new_tokens=max_new_tokens, samples=samples, seed=seed,
            sampler=Sampler(temperature, top_k, top_p, min_p, repetition_penalty), stop_tokens=stop_tokens, stop=stop,
            speculative=None,
        )  # fmt: skip
        if samples > len(self._seats):
            raise BadValue(f"samples={samples}: expected at most {len(self._seats)}, as many as the engine has rows")

        def answers(request: Request, prompt_tokens: int, seen: int, front: tuple[int, ...]) -> tuple[Answer, ...]:
            ends = StopStrings(request.stop, self.params.tokenizer, front)
            one = lambda: Answer(  # noqa: E731
                prompt_tokens,
                seen,
                request.max_new_tokens,
                request.stop_tokens,
                ends,
                logprobs,
                self._wake,
                lambda: self._runs,
            )
            every = tuple(one() for _ in range(samples))
            for answer in every:
                answer.group = every[0]
            return every

        work = asked(
            self.params, self.policy, self._learned, self.shapes, self._sizes, prompt, request, answers,
            fewer=fewer, budget=budget, named=prefix, prefix=stored, told=logprobs,
            draw=first if draw is None else draw, front=front,
        )  # fmt: skip
        before = self._pass_of(work)
        return work if before is None else before.before(work)


class _Read(NamedTuple):
    """What was told, on the host: of the steps `[R]` or of one, with a column per row."""

    token: np.ndarray
    chance: np.ndarray | None = None
    best: np.ndarray | None = None
    chances: np.ndarray | None = None

    @classmethod
    def of(cls, told: Told, tells: bool) -> "_Read":
        """The tokens, and the log-probabilities where somebody wants them."""
        names = cls._fields if tells else ("token",)
        found = {name: np.asarray(getattr(told, name)) for name in names}
        one = found["token"].ndim == 1
        return cls(**{name: each[None] if one else each for name, each in found.items()})


def _row(read: _Read, at: int, answer: Answer) -> tuple[list[int], list[Chance]]:
    """The tokens of one row, and what was told of each."""
    real = read.token[:, at] >= 0
    tokens = read.token[real, at].tolist()
    if not answer.tells or read.chance is None or read.best is None or read.chances is None:
        return tokens, []
    rows = (each[real, at].tolist() for each in (read.token, read.chance, read.best, read.chances))
    return tokens, [
        Chance(token, own, tuple(zip(ids, values, strict=True))) for token, own, ids, values in zip(*rows, strict=True)
    ]

"""A first answer comes soon: what is imported, which programs are compiled, and where they stay."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from engines import compilations
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv import ahead, prefilling, programs, run
from jaxkv.ahead import Ahead
from jaxkv.cli import main
from jaxkv.errors import BadValue
from jaxkv.plan import SIZES, rounded

HEAVY = ("jax", "flax", "orbax", "transformers", "scipy", "numba")


def told(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment = {**inherited, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first, absent",
    [
        ("import jaxkv", HEAVY),
        ("import jaxkv; jaxkv.policies.catalogue()", (*HEAVY[1:], "jax.experimental.pallas")),
    ],
)  # fmt: skip
def test_only_what_is_used_is_imported(first, absent):
    assert told(f"{first}; import sys; print(*(set({absent}) & sys.modules.keys()))") == ""


def test_every_name_is_there():
    for name in jaxkv.HOMES:
        assert getattr(jaxkv, name) is not None and name in dir(jaxkv)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = jaxkv.nothing_of_this_name


def test_a_function_stays_one_when_its_module_is_imported():
    asked = "import jaxkv.generate, jaxkv.calibrate; print(callable(jaxkv.generate), callable(jaxkv.calibrate))"
    assert told(asked) == "True True"


KEPT = """
import jax, jaxkv
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
jaxkv.keep_programs()
jax.jit(lambda x: x * 2 + 1)(3.0)
print(any(hits))
"""


def test_a_later_process_finds_the_programs(tmp_path, monkeypatch, capsys):
    here = {"JAXKV_CACHE": str(tmp_path)}
    assert [told(KEPT, **here), told(KEPT, **here)] == ["False", "True"]
    assert told(KEPT, **here, XLA_FLAGS="--xla_cpu_enable_fast_math=true") == "False", "other flags, another program"
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path))
    (kept,) = programs.kept()
    assert kept.folder == programs.own_folder() and kept.programs > 0 and kept.bytes > 0
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["programs"] == kept.programs
    assert main(["cache", "--clear"]) == 0 and "none in" in capsys.readouterr().out
    assert programs.kept() == []


@pytest.mark.usefixtures("nothing_chosen")
def test_the_folder_is_bounded(tmp_path):
    """What was used last stays; files of others are left alone."""
    now = time.time()
    for age, name in enumerate(("new-cache", "older-cache", "old-cache", "oldest-cache", "else")):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (now - 10**6 * age, now - 10**7))
    os.utime(tmp_path / "oldest-cache", (now - 10**8, now))  # written now, and read at a time that is not kept
    assert programs.keep_programs(tmp_path, limit=350) == tmp_path
    assert {file.name for file in tmp_path.iterdir()} == {"new-cache", "older-cache", "oldest-cache", "else"}


def test_a_program_more_costs_the_same_beside_many(tmp_path):
    """JAX looks at no other program when it adds one, as it would under a bound of its own."""
    code = f"""
import jax, jaxkv, numpy as np
folder = jaxkv.keep_programs({str(tmp_path)!r})
(folder / "other-cache").write_bytes(b"x")
(folder / "other-atime").mkdir()  # reading it would be an error
jax.jit(lambda x: x * 3 + 7)(np.ones(5, np.float32))
print(len(list(folder.glob("*-cache"))) > 1)
"""
    assert told(code) == "True"


def test_what_was_chosen_before_stays(tmp_path):
    code = "import jaxkv; print(jaxkv.keep_programs())"
    assert told(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine")) == str(tmp_path / "mine")


@pytest.fixture
def nothing_chosen():
    """Without the folder that tests share."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("nothing_chosen")
def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadValue, match="cannot be written"):
        programs.keep_programs(tmp_path / "file" / "inside")
    with pytest.raises(BadValue, match="limit=0: expected bytes"):
        programs.keep_programs(tmp_path, limit=0)


def test_what_nobody_uses_any_more_is_removed(tmp_path):
    old, read, own = (tmp_path / f"jaxlib-{name}" for name in ("old", "read", "own"))
    for folder in (old, read, own):
        folder.mkdir()
        (folder / "a-cache").write_text("x")
    past = time.time() - programs.UNUSED - 60
    for path in (old / "a-cache", old, own / "a-cache", own, read):
        os.utime(path, (past, past))
    os.utime(read / "a-cache", (time.time(), past))
    programs._forget_unused(own)
    assert not old.exists() and own.exists() and read.exists()


@given(count=st.integers(1, 10**6), sizes=st.sampled_from([1, 2, 4, 8]))
def test_sizes_are_few_and_near(count, sizes):
    assert count <= rounded(count, sizes) < count + max(16, count / sizes) and rounded(count, sizes) % 16 == 0


def test_a_block_has_few_sizes():
    assert len({rounded(count, SIZES) for count in range(1, 2049)}) == 24


@pytest.mark.some(1)
@pytest.mark.parametrize("name, size", [("full", {}), ("snapkv", {"budget": 24, "window": 6}), ("h2o", {"budget": 24})])
def test_near_sizes_share_programs(tiny, name, size):
    """Prompts of other lengths in one bucket, and other numbers of new tokens."""
    params, policy = tiny("llama3"), jaxkv.policy(name, **size)

    def generated(length, tokens):
        prompt = np.arange(length, dtype=np.int32) + 3
        return jaxkv.generate(params, prompt, policy=policy, max_new_tokens=tokens, stop_tokens=())

    generated(33, 9)
    compiled = [program._cache_size() for program in run.PROGRAMS]
    assert [generated(length, tokens).lengths[0] for length, tokens in ((37, 5), (48, 9), (41, 14))] == [5, 9, 14]
    assert [program._cache_size() for program in run.PROGRAMS] == compiled


@pytest.mark.long
def test_a_prompt_of_many_blocks_needs_two_programs(tiny):
    params, policy = tiny("llama3"), jaxkv.policy("h2o", budget=24, block=16)
    prompts = [np.arange(length, dtype=np.int32) + 3 for length in (40, 56, 90)]
    jaxkv.prefill(params, prompts[0], policy=policy)
    compiled = run.first_block._cache_size(), run.next_block._cache_size()
    for prompt in prompts[1:]:
        jaxkv.prefill(params, prompt, policy=policy)
    assert (run.first_block._cache_size(), run.next_block._cache_size()) == compiled


def test_after_a_warmup_nothing_is_compiled(tiny):
    params, policy = tiny("llama3"), jaxkv.policy("tova", budget=20)
    options = {"policy": policy, "max_new_tokens": 6, "stop_tokens": ()}
    took = jaxkv.warmup(params, (30, 60), batch=2, **options)
    assert [*took] == [30, 60] and min(took.values()) > 0
    compiled = [program._cache_size() for program in run.PROGRAMS]
    for length in (25, 57):
        jaxkv.generate(params, np.ones((2, length), np.int32), **options)
    assert [program._cache_size() for program in run.PROGRAMS] == compiled
    with pytest.raises(BadValue, match="at least 1"):
        jaxkv.warmup(params, (0,))


def test_a_warmup_decodes_where_the_first_text_ends_at_once(tiny):
    params, policy = tiny("llama3"), jaxkv.policy("tova", budget=19)
    options = {"policy": policy, "max_new_tokens": 5}
    firsts = {
        int(jaxkv.generate(params, np.full(30, token), **options, stop_tokens=()).tokens[0, 0]) for token in (0, 1)
    }
    options["stop_tokens"] = tuple(sorted(firsts))
    compiled = run.decode._cache_size()
    jaxkv.warmup(params, (30,), **options)
    assert run.decode._cache_size() == compiled + 1


def test_a_warmup_for_one_token_runs_one_text(tiny):
    """There is nothing to decode, however the text ends."""
    ran = []
    jaxkv.warmup(tiny("llama3"), (30,), max_new_tokens=1, progress=lambda what, done, of: ran.append(what))
    assert ran == ["prefill"]


def test_decoding_ends_with_the_last_row(tiny):
    """A chunk of steps is left when every row has ended: what it would have given is not computed."""
    params, policy = tiny("llama3"), jaxkv.policy("h2o", budget=24)
    free = jaxkv.generate(params, np.arange(20) + 3, policy=policy, max_new_tokens=30, stop_tokens=())
    stop = int(free.tokens[0, 4])
    out = jaxkv.generate(params, np.arange(20) + 3, policy=policy, max_new_tokens=30, stop_tokens=(stop,))
    count = free.tokens[0].tolist().index(stop) + 1
    assert out.tokens[0, : out.lengths[0]].tolist() == free.tokens[0, :count].tolist()
    assert int(out.cache.lengths[0]) == 20 + count - 1


def test_what_a_process_holds_compiled_is_bounded(tiny, monkeypatch):
    """By the number of programs, and by the memory maps that Linux gives a process: without them LLVM fails."""
    double: Any = jax.jit(lambda x: x * 2)
    monkeypatch.setattr(programs, "_HELD", [double])
    monkeypatch.setattr(programs, "_LAST", [0])
    monkeypatch.setattr(programs, "MOST", 3)
    for size in range(1, 12):
        programs.make_room()
        double(np.zeros(size, np.float32))
        assert double._cache_size() <= 4
    monkeypatch.setattr(programs, "MOST", 100)
    monkeypatch.setattr(programs, "_maps", lambda: 2**30)
    programs.make_room()
    assert double._cache_size() == 0
    monkeypatch.undo()
    params, ids = tiny("llama3"), np.arange(3, 20, dtype=np.int32)
    jaxkv.prefill(params, ids)
    jaxkv.prefill(params, ids[:3], scan_layers=True)
    assert jaxkv.run.first_block._cache_size() >= 2
    monkeypatch.setattr(programs, "MOST", 0)
    monkeypatch.setattr(programs, "_LAST", [-1])
    jaxkv.prefill(params, ids)
    assert jaxkv.run.first_block._cache_size() == 1, "what was held before is forgotten, what is wanted is there"


@pytest.mark.some(3)
@pytest.mark.parametrize("more", [{}, {"samples": 2, "temperature": 1.0, "repetition_penalty": 1.2}], ids=["", "drawn"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("full", {}), ("h2o", {"budget": 24}), ("adakv", {"budget": 24, "window": 6}), ("kivi", {}), ("quest", {}),
        ("treekv", {"budget": 24}), ("freqkv", {"budget": 24}), ("laq-h2o-int4", {"budget": 24}),
    ],
)  # fmt: skip
def test_programs_are_compiled_side_by_side_and_once(tiny, unchecked, name, options, more):
    """The prompt leaves what it is foreseen to leave, or decode would be compiled a second time."""
    params, policy = tiny("llama3"), jaxkv.policy(name, block=16, **options)
    prompt, wait, foreseen = np.arange(40, dtype=np.int32) + 3, Ahead.wait, set()
    asked = functools.partial(jaxkv.generate, params, policy=policy, max_new_tokens=5, stop_tokens=(), **more)

    def told(of, program):
        foreseen.update(of._made)
        wait(of, program)

    def compiled_once(prompt, cache=None):
        for program in run.PROGRAMS:
            program.clear_cache()
        with mock.patch.object(Ahead, "wait", told), compilations() as seen:
            cache = asked(prompt, cache=cache).cache
        called = sum(program._cache_size() for program in run.PROGRAMS)
        assert sum(name in ("jit(_block)", "jit(decode)", "jit(first_token)") for name in seen) == called
        return cache

    with (
        mock.patch.object(prefilling, "foreseeable", ahead.foreseeable),
        mock.patch.dict(ahead.FORMS, clear=True),
    ):
        cache = compiled_once(prompt)
        assert foreseen == {*run.PROGRAMS}
        foreseen.clear()
        with mock.patch.object(Ahead, "wait", told), mock.patch.object(jax, "eval_shape") as traced:
            asked(prompt[:39])
        assert not foreseen and not traced.called, "what is there is neither traced nor lowered again"
        if not more:
            compiled_once(prompt[:3], cache)


def test_what_cannot_be_foreseen_is_compiled_when_it_is_called(tiny, unchecked):
    """The results of weights that are committed to a device are so as well, and their programs are others."""
    params, prompt = tiny("llama3"), np.arange(20, dtype=np.int32) + 3
    weights = jax.device_put(params.weights, jax.devices()[0])
    committed = dataclasses.replace(params, weights=weights)
    with (
        mock.patch.object(prefilling, "foreseeable", ahead.foreseeable),
        mock.patch.object(Ahead, "add") as add,
    ):
        jaxkv.generate(committed, prompt, max_new_tokens=2, stop_tokens=())
        with jax.disable_jit():
            jaxkv.prefill(params, prompt[:3])
    assert not add.called


def test_what_a_thread_could_not_compile_is_raised_where_it_is_waited_for():
    made, broken = Ahead(), mock.Mock()
    broken.lower.return_value.compile.side_effect = RuntimeError("no memory")
    with mock.patch.dict(ahead.FORMS, clear=True):
        made.add(broken, 1)
        made.wait(run.decode)  # nobody asked for it
        with pytest.raises(RuntimeError, match="no memory"):
            made.wait(broken)


def test_what_was_not_begun_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(ahead, "AT_ONCE", 1)
    made, going, held, waiting = Ahead(), threading.Event(), mock.Mock(), mock.Mock()
    held.lower.return_value.compile.side_effect = going.wait
    with mock.patch.dict(ahead.FORMS, clear=True):
        made.add(held, 1)
        made.add(waiting, 1)
        made.drop()
        going.set()
        assert {asked[0] for asked in ahead.FORMS} == {held}

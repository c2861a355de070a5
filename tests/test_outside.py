"""Parts written outside the package keep the contract as the package's own do, with no file of it touched."""

import dataclasses
import re
import sys
import tomllib
from pathlib import Path

import behaviour
import jax
import jax.numpy as jnp
import numpy as np
import outside_parts
import pytest
import test_contract as contract

import jaxkv
from jaxkv import cli
from jaxkv.errors import BadValue
from jaxkv.policies import Codec, Evicted
from jaxkv.policies.parts import PARTS
from jaxkv.store.codecs import Codecs
from jaxkv.store.entries import Change

H2O = """
[prefill]
observe = {{ kind = "all-queries" }}
score = {{ kind = {score} }}
aggregate = {{ queries = "sum", group = "mean" }}
select = {{ sinks = 2, recent = 4 }}
evicted = {{ kind = {evicted} }}
[decode]
observe = {{ kind = "current-query" }}
score = {{ kind = {score} }}
select = {{ sinks = 2, recent = 4 }}
evicted = {{ kind = {evicted} }}
"""
KINDS = {"score": '"accumulated-attention"', "evicted": '"drop"'}
POLICIES = {  # a policy for each part
    "score": H2O.format(**{**KINDS, "score": '"balance"'}),
    "evicted": H2O.format(**{**KINDS, "evicted": '"fold", share = 0.2'}),
    "allocate": 'allocate = { kind = "seesaw", swing = 3 }\n' + H2O.format(**KINDS),
    "codec": 'store = { keys = { kind = "half" }, values = { kind = "half" } }\n' + H2O.format(**KINDS),
}


@pytest.fixture(params=POLICIES)
def file(request, tmp_path):
    """The TOML file of a policy with one outside part."""
    path = tmp_path / f"{request.param}.toml"
    path.write_text(POLICIES[request.param], encoding="utf-8")
    return str(path)


@pytest.mark.long
def test_outside_parts_keep_the_contract(tiny, file, tmp_path):
    contract.test_rules_of_the_family(tiny, file)
    contract.test_save_and_restore_equals_going_on(tiny, file, tmp_path)
    contract.test_scan_equals_stepping_by_hand(tiny, file)
    contract.test_empty_slots_are_never_read(tiny, file)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_text(H2O.format(**{**KINDS, "score": '"accumulated-attention"'}), encoding="utf-8-sig")
    assert jaxkv.policy(path, budget=16).decode.score.kind == "accumulated-attention"


def test_each_part_is_short_and_says_what_it_is():
    source = Path(outside_parts.__file__).read_text(encoding="utf-8")
    parts = re.split(r"\n\n\n(?=@register)", source)[1:]
    assert len(parts) == 5 and all(part.count("\n") <= 60 for part in parts)
    kinds = {"score": "balance", "evicted": "fold", "allocate": "seesaw", "keys": "half"}
    assert all(PARTS[name].parts[kind].__module__ == "outside_parts" for name, kind in kinds.items())
    assert issubclass(PARTS["values"].parts["half"], Codec)


@pytest.mark.long
def test_what_the_parts_do(tiny, tmp_path):
    """The layers' budgets, the bytes of the codes, the entries folded; each from its file."""
    params, made = tiny(contract.FAMILY), {}
    for name, text in POLICIES.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        made[name] = jaxkv.prefill(params, behaviour.prompts("tiny", 0), policy=jaxkv.policy(path, budget=16))
    limits = np.asarray(made["allocate"].limits)[:, 0]
    assert limits.tolist() == [13 + 6 * (layer % 2) for layer in range(len(limits))]
    assert made["codec"].kv_bytes * 2 == made["score"].kv_bytes
    assert np.asarray(made["evicted"].layers[0].beside["folded"].count).tolist() == [[29, 29], [0, 0], [14, 14]]
    assert tomllib.loads(POLICIES["evicted"])["prefill"]["evicted"]["share"] == 0.2


def test_the_command_line_takes_them(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(POLICIES["evicted"], encoding="utf-8")
    cli.main(["policies", str(path), "--parts", str(Path(outside_parts.__file__)), "--json"])
    assert '"fold"' in capsys.readouterr().out
    assert sys.modules["outside_parts"] is outside_parts


class Cut(Codec):
    """Does not bring channels back."""

    kind = "cut-short"

    def encode(self, x):
        return x[..., :4]

    def decode(self, code):
        return code


class Turned(Cut):
    """Channels before the slots."""

    kind = "turned"

    def encode(self, x):
        return jnp.moveaxis(x, -1, 0)

    def decode(self, code):
        return jnp.moveaxis(code, 0, -1)


class Rule(Evicted):
    """Survivors alone, or fewer of them, by what is asked."""

    moves = True

    def absorb(self, beside, kept, lost, facts):
        return kept if self.kind == "alone" else (jax.tree.map(lambda x: x[:, :, 1:], kept), beside)


class One(Rule):
    """Gives the state of a rule that has none."""

    kind, single = "stateful", True

    def absorb(self, beside, kept, lost, facts):
        return kept, beside

    def take(self, beside, held, takers, gone, facts):
        return Change(gone.positions[..., 0], gone.keys[:, :, 0], gone.values[:, :, 0]), takers


def of_kind(name: str) -> type[Evicted]:
    return dataclasses.dataclass(frozen=True)(type(name, (Rule,), {"kind": name, "__doc__": Rule.__doc__}))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"keys": Cut()}, r"codec 'cut-short': decode gives float32 of shape \(1, 2, 8, 4\) .* shape \(1, 2, 8, 16\)"),
        ({"values": Turned()}, r"codec 'turned': encode gives .* begin with the slots' dimensions, \(1, 2, 8\)"),
        (of_kind("alone")(), "absorb of evicted kind 'alone': it gives Entries; expected a pair"),
        (
            of_kind("fewer")(),
            r"absorb of evicted kind 'fewer': survivors.keys is \(1, 2, .*, 16\), not \(1, 2, .*, 16\)",
        ),
        (One(), r"take of evicted kind 'stateful': state is \(1, 2, .*\), not None"),
    ],
)
def test_a_part_that_gives_other_shapes_is_named(tiny, part, words):
    h2o = jaxkv.policy("h2o", budget=24)
    if isinstance(part, Evicted):
        phases = {name: dataclasses.replace(getattr(h2o, name), evicted=part) for name in ("prefill", "decode")}
        policy = dataclasses.replace(h2o, **phases)
    else:
        policy = dataclasses.replace(h2o, store=Codecs(**part))
    with pytest.raises(BadValue, match=words):
        jaxkv.generate(tiny(contract.FAMILY), np.arange(3, 43), policy=policy, max_new_tokens=2)

"""`jaxkv policies`: the catalogue of methods, and the parts of one."""

import dataclasses
import json
import sys
from typing import Any

from tyro.conf import Positional

from jaxkv.cli.options import register


@dataclasses.dataclass(frozen=True)
class Policies:
    """The catalogue of methods, or the parts of one."""

    name: Positional[str | None] = None
    """A name, or a .toml file."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own."""
    json: bool = False

    def __call__(self) -> int:
        from jaxkv.policies.catalogue import catalogue, named
        from jaxkv.policies.policy import to_dict

        register(self.parts)
        known = [*catalogue().values()] if self.name is None else [named(self.name)]
        if self.json:
            print(json.dumps({policy.name: {**to_dict(policy), "facts": _facts(policy)} for policy in known}))
            return 0
        if self.name is not None:
            (policy,) = known
            print("\n".join(filter(None, (": ".join(filter(None, (policy.name, policy.title))), policy.paper))) + "\n")
            print(f"{'fidelity':8} {': '.join(filter(None, (policy.fidelity or 'not said', policy.differs)))}")
            for phase, text in _parts(policy).items():
                print(f"{phase:8} {text}")
            plain = {"allocate": "uniform", "flow": "straight", "read": "all", "store": "plain"}
            for part, otherwise in plain.items():
                print(f"{part:8} {_phrase(to_dict(policy).get(part, otherwise))}")
            grows = ", whose budget grows with the text" if policy.grows else ""
            print(f"{'rope':8} {policy.rope}\n{'block':8} {policy.block}{grows}")
            print(f"{'floor':8} {policy.floor} tokens at least")
            print(f"{'bounded':8} {_bounds(policy)}")
            print(f"{'question':8} {'steers' if policy.query_aware else 'does not steer'} what is kept of the prompt")
            print(f"{'needs':8} {'calibration' if policy.calibrated else 'nothing measured before'}")
            return 0
        from rich.console import Console
        from rich.table import Table

        table = Table("name", "paper", "fidelity", "prefill", "decode", "bounded", "query-aware", "calibration")
        for policy in known:
            parts = _parts(policy)
            bounded, aware = ("yes" if said else "no" for said in (policy.bounded, policy.query_aware))
            before = "yes" if policy.calibrated else "none"
            facts = policy.name, policy.paper, policy.fidelity, parts["prefill"], parts["decode"]
            table.add_row(*facts, bounded, aware, before)
        console = Console(width=None if sys.stdout.isatty() else 160)
        with console.capture() as told:  # rich itself would end with 1 where the reader goes
            console.print(table)
        print(told.get(), end="")
        return 0


def _parts(policy: Any) -> dict[str, str]:
    """The parts of each phase in words: its kinds, and what differs from the part's defaults."""
    from jaxkv.policies.policy import to_dict

    words = {"prefill": "keeps all", "decode": "adds, evicts nothing"}
    for phase in ("prefill", "decode"):
        table = to_dict(policy).get(phase)
        if table is not None:
            words[phase] = "; ".join(f"{part}: {_phrase(value)}" for part, value in table.items())
    if "read" in to_dict(policy):
        words["decode"] += f"; reads {_phrase(to_dict(policy)['read'])}"
    return words


def _facts(policy: Any) -> dict[str, Any]:
    """What its parts say of it together."""
    facts = {"bounded": policy.bounded, "query_aware": policy.query_aware}
    return {**facts, "calibration": policy.learns, "floor": policy.floor}


def _bounds(policy: Any) -> str:
    """Whether the policy bounds the cache while decoding, and what would."""
    from jaxkv.policies.catalogue import named

    if policy.bounded:
        return "while decoding too"
    if not policy.evicts:
        return "no: it keeps all tokens"
    other = policy.decode is None and dataclasses.replace(policy, decode=named("h2o").decode).bounded
    return "not while decoding" + "; --option decode=h2o bounds that" * other


def _phrase(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    inner = {k: f"({_phrase(v)})" if isinstance(v, dict) else v for k, v in value.items() if k != "kind"}
    return " ".join([value.get("kind", ""), *(f"{k}={v}" for k, v in inner.items())]).strip()

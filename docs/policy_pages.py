"""The catalogue's pages: one for each policy of `configs/policies/`, and a table of all of them.

    python docs/policy_pages.py FOLDER

A page has the paper, what the policy is made of, how faithful it is, what checks it (`tests/checks.py`), what was
measured of it (`benchmarks/results/`), and what `docs/notes.md` says of it.
"""

import dataclasses
import functools
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checks
from generated import put

from jaxkv.configs import config_files
from jaxkv.policies import Policy, catalogue
from jaxkv.policies.parts import PARTS
from jaxkv.policies.policy import to_dict

RESULTS = ROOT / "benchmarks" / "results"
OLD_NAMES = {"dapq": "spans", "dapq-longflow": "spans-longflow"}  # name in the files of costs -> today's
SETTING = (
    "SmolLM2-135M, 48 questions about a needle in 512 tokens and 8 texts of prose, 128 tokens kept; "
    "`jaxkv eval catalogue`, two cores of an AMD EPYC, jax 0.12.0.1"
)
COST_SETTING = (
    "the first six layers of SmolLM2-135M, budget 256 after 2048 tokens; `python -m benchmarks.family_cost "
    "--layers 6`, one core of an AMD EPYC, jax 0.12.0.1, 2026-11-22"
)
FIDELITIES = {
    "faithful": "Faithful: what its paper or release does.",
    "simplified": "Simplified: ",
    "ours": "Ours: no paper has it in this form.",
}
CONVENTIONS = (
    "*Fidelity* says how far a policy is what its paper or release does. Two conventions hold for all of them, and are "
    "said here alone. A prompt that is longer than a block (`block=`: 2048 tokens, 256 in `jaxkv serve`, or the "
    "policy's own) is cut behind each of its blocks, so what a paper does once for the whole prompt is done once for "
    "each block; set `block=` to the prompt's length for theirs. And where query heads share a KV head, the KV head "
    "chooses, by the mean, sum or maximum of its query heads as the policy says; released code that repeats the keys "
    "lets each query head choose. [Make a policy](../policies.md#how-faithful-a-method-is) says more."
)
PHASES = {
    "prefill": ("The prompt", "All of the prompt is kept."),
    "decode": ("New tokens", "New tokens are added to what the prompt left, and nothing is evicted."),
}

PLAIN = {
    "aggregate": "How queries, neighbours and heads are summed up.",
    "select": "What stays whatever its score, and whether tokens or chunks stay.",
    "reserve": "Slots left free for new tokens.",
    "every": "New tokens between two cuts.",
    "rope": "Where keys are turned: to their places in the text, or in the cache (`sinks` or `cache`).",
    "block": "Tokens of the prompt that run at a time.",
    "grows": "Whether a prompt's budget grows with the text that its blocks have brought.",
    "store": "How keys and values lie in a slot.",
}


@functools.cache
def quality() -> dict[str, dict[str, Any]]:
    """By policy: what `benchmarks.all_policies` stored, shares of right answers and KL with the ends of their
    intervals."""
    stored = json.loads((RESULTS / "all-policies.json").read_text(encoding="utf-8"))
    return {row["policy"]: row for row in stored["policies"] if "kl" in row}


@functools.cache
def costs() -> dict[str, dict[str, float]]:
    """By policy: `prefill` over plain prefill, and a `step` over LongFlow's (later files count)."""
    found: dict[str, dict[str, float]] = {}
    for name in ("family_cost", *(f"family_cost-{more}" for more in ("again", "layers", "lacache", "compactor"))):
        for row in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]:
            found.setdefault(OLD_NAMES.get(row["policy"], row["policy"]), {}).update(
                {key: row[key] for key in ("prefill", "step") if row.get(key)}
            )
    return found


@functools.cache
def notes() -> dict[str, list[str]]:
    """By policy: the sections of `docs/notes.md` whose heading names it."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "docs" / "notes.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        for name in re.findall(r"`([^`]+)`", heading):
            found.setdefault(name, []).append(body.strip())
    return found


def phrase(value: Any) -> str:
    """A part's table in words: its kind, then its fields."""
    if not isinstance(value, dict):
        return f"`{value}`"
    fields = [
        f"{key}: {phrase(inner)}" if isinstance(inner, dict) else f"`{key}={inner}`"
        for key, inner in value.items()
        if key != "kind"
    ]
    kind = f"`{value['kind']}`" if "kind" in value else ""
    inner = ", ".join(fields)
    return f"{kind} ({inner})" if kind and inner else kind or inner


def does(part: str, table: Any) -> str:
    """The first line of the docstring of the part's class."""
    kind = table.get("kind") if isinstance(table, dict) else None
    if part in PLAIN:
        return PLAIN[part]
    found = PARTS[part].parts.get(kind) if part in PARTS else None
    first = "" if found is None else (inspect.getdoc(found) or "").partition("\n\n")[0]
    return first.replace("\n", " ").replace("|", "\\|")


def of_a_phase(phase: Any, table: dict[str, Any]) -> dict[str, Any]:
    """The table of a phase, who looks and the score in front, also where they are the defaults."""
    always = {part: {"kind": getattr(phase, part).kind} for part in ("observe", "score")}
    return {**always, **table}


def parts_table(tables: dict[str, Any]) -> str:
    """Parts with their settings, and what each does."""
    rows = [f"| `{part}` | {phrase(table)} | {does(part, table)} |" for part, table in tables.items()]
    return "\n".join(["| part | here | what it does |", "|---|---|---|", *rows])


def options(part: Any) -> dict[str, Any]:
    """The numbers and names that `jaxkv.policy(name, option=...)` sets, with their values here."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            for name, inner in options(value).items():
                found.setdefault(name, []).extend(each for each in inner if each not in found[name])
        elif not isinstance(part, Policy):
            found.setdefault(field.name, [])
            if value not in found[field.name]:
                found[field.name].append(value)
    return found


def linked(paper: str) -> str:
    """arXiv numbers as links."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def checked(name: str) -> str:
    """What checks the policy, a line each."""
    lines = [
        f"- Against **{check.against}**, {what_of(check.of)}: `tests/{check.test}`"
        for check in (checks.checks(name) if name in checks.CHECKS else ())
    ]
    contract = "- The rules that every policy keeps: `tests/test_contract.py`"
    return "\n".join([*lines, contract])


def what_of(of: str) -> str:
    return {"prefill": "what is kept of a prompt", "decode": "what every step leaves"}.get(
        of, "what is kept of a prompt and at every step" if "," in of else "its own part alone"
    )


def measured(name: str) -> str:
    """The figures of a policy, with what they were measured on."""
    lines, found, cost = [], quality().get(name), costs().get(name)
    if found:
        right, (kl, *_) = "{:.0f} %** ({:.0f} to {:.0f})".format(*(100 * x for x in found["right"])), found["kl"]
        lines.append(
            f"- **{right} of the answers right, KL divergence from the full cache **{kl:.3f}**, the same likeliest "
            f"token in **{100 * found['top1']:.0f} %** of the places ({SETTING}, {found['date']}; in brackets the 95 % "
            "interval)."
        )
    if cost:
        said = [f"prefill takes **{cost['prefill']:.2f}** of plain prefill"] if "prefill" in cost else []
        said += [f"a decode step **{cost['step']:.2f}** of LongFlow's"] if "step" in cost else []
        words = " and ".join(said)
        lines.append(f"- {words[0].upper()}{words[1:]} ({COST_SETTING}; a tenth is noise).")
    if not lines:
        return "Not measured yet."
    return "\n".join(lines)


def page(name: str, policy: Policy, toml: str) -> str:
    """The Markdown of a policy's page."""
    tables, title = to_dict(policy), policy.title or name
    budget = 256 if policy.floor <= 256 else 512
    size = f", budget={budget}" if policy.evicts else ""
    flag = f" --budget {budget}" if policy.evicts else ""
    text = [f"# {name}", f"**{title}.** {linked(policy.paper)}{'.' if policy.paper else ''}"]
    text.append(f'```python\npolicy = jaxkv.policy("{name}"{size})\n```')
    text.append(f'```sh\njaxkv generate --policy {name}{flag} "..."\n```')
    fidelity = FIDELITIES[policy.fidelity] + (f"{policy.differs}." if policy.differs else "")
    text += ["## How faithful it is", fidelity, *notes().get(name, [])]
    text.append("## What it is made of")
    for phase, (words, without) in PHASES.items():
        there = getattr(policy, phase)
        text += [f"### {words}", without if there is None else parts_table(of_a_phase(there, tables[phase]))]
    whole = {
        part: tables[part] for part in ("allocate", "read", "flow", "store", "rope", "block", "grows") if part in tables
    }
    if whole:
        text += ["### The whole policy", parts_table(whole)]
    smallest = f"- The smallest budget is {policy.floor} token{'s' if policy.floor > 1 else ''}."
    facts = [
        smallest if policy.evicts else "- It takes no budget.",
        f"- A question at the end of the prompt {'steers' if policy.query_aware else 'does not steer'} what is kept.",
    ]
    if policy.calibrated:
        facts.append("- It needs `jaxkv calibrate MODEL` once for each model (SmolLM2's comes with jaxkv).")
    if policy.evicts and policy.decode is None:
        facts.append('- The cache grows by one entry for each new token; `decode="h2o"` bounds it.')
    elif policy.evicts and not policy.bounded:
        facts.append("- Some of its layers hold the whole text, so the cache as a whole is not bounded.")
    text.append("\n".join(facts))
    text += ["## What checks it", checked(name), "## What was measured", measured(name)]
    if found := {key: values for key, values in options(policy).items() if policy.evicts}:
        rows = [f"| `{key}` | {', '.join(f'`{value!r}`' for value in values)} |" for key, values in found.items()]
        text += [
            "## Options",
            f'`jaxkv.policy("{name}", budget=256, option=value)` sets one in every part that has it; `prefill_` or '
            "`decode_` in front sets it in that phase alone.",
            "\n".join(["| option | value here |", "|---|---|", *rows]),
        ]
    text += ["## Its file", f"`configs/policies/{name}.toml`:", f"```toml\n{toml.strip()}\n```"]
    return "\n\n".join(text) + "\n"


def index(found: dict[str, Policy]) -> str:
    """All policies in one table."""
    rows = []
    for name, policy in found.items():
        of = quality().get(name)
        figures = [f"{100 * of['right'][0]:.0f}", f"{of['kl'][0]:.3f}"] if of else ["-", "-"]
        against = [check.against for check in checks.checks(name)] if name in checks.CHECKS else ["contract"]
        short = policy.title.partition(":")[0] or name
        decodes = (
            "evicts" if policy.bounded else "partly" if policy.decode else "adds" if policy.evicts else "keeps all"
        )
        cells = [f"[`{name}`]({name}.md)", short, decodes, policy.fidelity, ", ".join(dict.fromkeys(against)), *figures]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n\n".join(
        [
            "# Catalogue",
            "Every method by name: click one to see its paper, its parts, how faithful it is, what checks it and what "
            "was measured. [Choosing a policy](../choosing.md) says which to take when.",
            CONVENTIONS,
            "*Decode*: whether new tokens push others out (`evicts`), in some layers alone (`partly`), or are added to "
            'what the prompt left (`adds`; `decode="h2o"` bounds such a policy). *Checked '
            "against*: `released code` is a golden from the authors' own program, `kvpress` one from kvpress 0.5.5, "
            "`independent form` the rule written a second time. *Right*, *KL*: per cent of right answers and the "
            f"divergence from the full cache ({SETTING}; each page has its date).",
            "\n".join(
                [
                    "| policy | method | decode | fidelity | checked against | right | KL |",
                    "|---|---|---|---|---|---:|---:|",
                    *rows,
                ]
            ),
            "```{toctree}\n:hidden:\n\n" + "\n".join(found) + "\n```",
        ]
    )


def pages() -> dict[str, str]:
    """All pages by their file names."""
    found, files = dict(sorted(catalogue().items())), config_files("policies")
    made = {f"{name}.md": page(name, each, files[name].read_text(encoding="utf-8")) for name, each in found.items()}
    return {"index.md": index(found) + "\n", **made}


def write(folder: Path) -> None:
    """All pages of the catalogue."""
    put(folder, pages())


if __name__ == "__main__":
    write(Path(sys.argv[1]))

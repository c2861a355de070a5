"""What a call of `generate` asks for, checked in one place before anything runs, and how its programs run."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv.checks import check_arguments, fits, shown
from jaxkv.errors import BadCheckpoint, BadValue
from jaxkv.plan import SIZES
from jaxkv.policies.catalogue import catalogue
from jaxkv.policies.policy import Policy
from jaxkv.sampling import Sampler
from jaxkv.sizes import on_model
from jaxkv.speculative.draft_model import DraftModel, SelfDraft
from jaxkv.speculative.session import Speculative
from jaxkv.stop_strings import decoded
from jaxkv.store import KVCache
from jaxkv.store.line import line_of
from jaxkv.weights.params import Params
from pallas_kernels.decode_attend_score.api import OPERATION

Progress = Callable[[str, int, int], None]  # ("prefill", "decode" or "calibrate", done, of)


@dataclasses.dataclass(frozen=True)
class Execution:
    """How programs run: the kernels' `implementation` (None: the device's), layers in a loop, `sizes` of prompts per
    doubling of their length, and who hears of progress.
    """

    implementation: str | None = None
    scan_layers: bool = False
    sizes: int = SIZES
    progress: Progress | None = None

    def __post_init__(self):
        check_arguments(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        check_platform(self.implementation)


def check_platform(implementation: str | None) -> None:
    """Raises `BadValue` for kernels of another platform than the one that programs run on."""
    platform, here = OPERATION.kernels.get(str(implementation)), jax.default_backend()
    if platform not in (None, here):
        raise BadValue(
            f"implementation={implementation!r} is for a {platform}, and this runs on a {here}: leave it out, or take "
            "'reference'"
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for beside prompt and cache: under which policy, how many tokens, drawn how, and where they end."""

    policy: Policy
    max_new_tokens: int
    sampler: Sampler
    samples: int
    seed: int
    stop_tokens: tuple[int, ...]
    stop: tuple[str, ...]
    speculative: Speculative | None


def checked_request(
    params: Params,
    prompt: Any,
    cache: KVCache | None,
    *,
    policy: Policy | None,
    max_new_tokens: int,
    sampler: Sampler,
    samples: int,
    seed: int,
    stop_tokens: Sequence[int] | None,
    stop: str | Sequence[str] | None,
    speculative: Speculative | None,
) -> Request:
    """The request that these arguments of `generate` make. Raises `BadValue` or `BadCheckpoint` where they cannot."""
    check_model(params, cache)
    check_arguments(max_new_tokens=max_new_tokens, samples=samples, seed=seed)
    if stop_tokens is None:
        stop_tokens = params.config.stop_tokens
    else:
        expected = "a sequence of token ids, such as (3,), () for none, or None for the model's"
        stop_tokens = sequence_of("stop_tokens", stop_tokens, int, expected)
        wrong = [token for token in stop_tokens if not _of_model(params, token)]
        if wrong:
            raise BadValue(
                f"stop_tokens={shown(stop_tokens)}, and {wrong[0]} is none of the model's: expected token ids from 0 "
                f"to {params.config.vocab_size - 1}"
            )
    stop = (stop,) if isinstance(stop, str) else () if stop is None else stop
    stop = sequence_of("stop", stop, str, "text, or several texts")
    if "" in stop:
        raise BadValue("stop holds an empty string, which every text contains: leave it out")
    if stop and params.tokenizer is None:
        raise BadValue("stop strings need a tokenizer, and these params have none: use stop_tokens=")
    special = {text: token for text in stop if (token := _special(params.tokenizer, text)) is not None}
    named = (token for token in special.values() if _of_model(params, token))  # a tokenizer may have more
    stop_tokens = (*stop_tokens, *(token for token in named if token not in stop_tokens))
    stop = tuple(text for text in stop if text not in special)
    chosen = checked_policy(params, policy, cache)
    check_speculative(params.layout.mesh, speculative)
    if prompt is None and cache is None:
        raise BadValue("neither prompt nor cache: expected a prompt, or a cache to go on from")
    if prompt is None and cache is not None and int(np.asarray(cache.pending).min()) < 0:
        raise BadValue("no prompt, and the cache holds no sampled token to go on from: give a prompt")
    if cache is not None:
        _check_text(cache, sampler, speculative)
    return Request(chosen, int(max_new_tokens), sampler, int(samples), int(seed), stop_tokens, stop, speculative)


def _of_model(params: Params, token: int) -> bool:
    """Whether a text of the model may end with the token: it can give it, or has it among its own stop tokens."""
    return 0 <= token < params.config.vocab_size or token in params.config.stop_tokens


def _special(tokenizer: Any, text: str) -> int | None:
    """The special token whose name the text is, such as "<|im_end|>", which no decoded text holds; None for others.
    Raises `BadValue` for text that holds such a name and more."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for token in (int(token) for token in ids if not decoded(tokenizer, [int(token)])):
        name = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False).strip()
        if name == text or (name and len(ids) == 1):  # behind a space that the tokenizer puts in front
            return token
        if name and name in text:
            raise BadValue(
                f"stop={shown(text)} holds the special token {name!r} and more, and no decoded text has its name: give "
                f"{name!r} alone"
            )
    return None


def check_speculative(mesh: Mesh | None, speculative: Any) -> None:
    """Raises `BadValue` for what is no method of speculation (or None), and for a draft model on another mesh."""
    if speculative is None:
        return
    if not isinstance(speculative, Speculative):
        raise BadValue(
            f"speculative={shown(speculative)}: expected a method such as jaxkv.speculative.AASD() or PromptLookup()"
        )
    if isinstance(speculative, DraftModel):
        own = speculative.params.layout.mesh
        devices = [None if each is None else each.devices.ravel().tolist() for each in (mesh, own)]
        if devices[0] != devices[1]:
            raise BadValue(
                f"a draft model on {_named(own)} for a model on {_named(mesh)}: load both with the same mesh="
            )


def _named(mesh: Mesh | None) -> str:
    return "one device" if mesh is None else f"a mesh of {mesh.size} devices"


def check_model(params: Any, cache: Any = None) -> None:
    """Raises `BadValue` where these are no `Params` and no `KVCache` (or None)."""
    if not isinstance(params, Params):
        raise BadValue(f"params={shown(params)}: expected what jaxkv.load gives, such as jaxkv.load('smollm2-135m')")
    if cache is not None and not isinstance(cache, KVCache):
        raise BadValue(f"cache={shown(cache)}: expected a KVCache, as jaxkv.prefill or .cache of a generation give")


def sequence_of(name: str, values: Any, kind: type, expected: str) -> tuple:
    """The values as a tuple. Raises `BadValue` unless all of them are of the kind."""
    many = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    found = tuple(values) if many else ()
    if not many or not all(fits(each, kind) for each in found):
        raise BadValue(f"{name}={shown(values)}: expected {expected}")
    return tuple(map(kind, found))


def checked_policy(params: Params, policy: Policy | None, cache: KVCache | None) -> Policy:
    """The policy to run under, with the budget that its bytes allow. "full" on a cache keeps everything that follows,
    and keeps it as the cache has it: at the same positions, in the same codes. Raises `BadCheckpoint` where the cache
    was made under another model or policy.
    """
    full = catalogue()["full"]
    if policy is not None and not isinstance(policy, Policy):
        raise BadValue(f"policy={shown(policy)}: expected a Policy, such as jaxkv.policy('dapq-longflow', budget=256)")
    if policy is not None:
        policy = on_model(params, policy)
    if cache is None:
        return full if policy is None else policy
    if cache.model != params.fingerprint:
        raise BadCheckpoint(f"the cache was made by model {cache.model}, but these params are {params.fingerprint}")
    if cache.policy.store.keys.plain:  # codes have dtypes of their own
        held = (line_of(cache.layers) or cache.layers[0]).entries.keys.dtype
        if held != params.dtype:
            raise BadCheckpoint(
                f"the cache holds keys of {held}, but these params run in {params.dtype}: load the model with "
                f"dtype='{held}', or prefill the text again"
            )
    if policy is None:
        return cache.policy
    goes_on = dataclasses.replace(full, block=policy.block, rope=cache.policy.rope, store=cache.policy.store)
    if dataclasses.replace(policy, block=full.block) == full:
        return goes_on
    if policy not in (cache.policy, goes_on):
        fields = [field.name for field in dataclasses.fields(policy)]
        name = next(name for name in fields if getattr(policy, name) != getattr(cache.policy, name))
        raise BadCheckpoint(
            f"the cache was made under {cache.policy.name!r}, not under {policy.name!r} as given ({name} is "
            f"{shown(getattr(cache.policy, name))} there, {shown(getattr(policy, name))} now): leave policy= out, or "
            "give policy('full') to keep everything that follows"
        )
    return policy


def _check_text(cache: KVCache, sampler: Sampler, speculative: Speculative | None) -> None:
    """Raises `BadValue` where the cache's text is needed and not known, or cannot be what the cache has seen."""
    if cache.tokens is None:
        unknown = (
            "the tokens in cache= are not known (its `tokens` is None): give the whole text as a prompt, or put it "
            "there, int32 [B, N] with -1 behind each row, with dataclasses.replace(cache, tokens=...)"
        )
        if sampler.repetition_penalty is not None:
            raise BadValue(f"repetition_penalty counts the whole text, but {unknown}")
        if isinstance(speculative, DraftModel | SelfDraft):
            raise BadValue(f"a draft model must read the whole text, but {unknown}; AASD() and PromptLookup() need not")
        return
    held, lengths = np.sum(cache.tokens >= 0, axis=1), np.asarray(cache.lengths)
    if held.tolist() != lengths.tolist():
        raise BadValue(f"the cache's `tokens` are {held.tolist()} per row: expected {lengths.tolist()}, as it has seen")


def checked_pseudo(pseudo: Any, rows: int, policy: Policy, vocab_size: int) -> np.ndarray:
    """The pseudo tokens as int32, -1 behind a row's own. Raises `BadValue` where they don't fit the rows, the policy or
    the vocabulary."""
    if policy.prefill is None or policy.prefill.observe.extra < 1 or policy.prefill.observe.drafts:
        raise BadValue(
            f"pseudo={shown(pseudo)} under policy {policy.name!r}: expected none, for its queries are others"
        )
    ids = checked_ids("pseudo", pseudo, rows, vocab_size)
    if (ids[:, 0] < 0).any():
        raise BadValue(f"row {int(np.argmin(ids[:, 0]))} of pseudo has no ids: expected at least one in each row")
    return ids


def checked_ids(name: str, ids: Any, rows: int, vocab_size: int) -> np.ndarray:
    """The token ids of so many rows as int32 [B, N], -1 behind a row's own. Raises `BadValue` for what is none."""
    try:
        found = np.asarray(ids)
    except (ValueError, TypeError):
        raise BadValue(
            f"{name}={shown(ids)}: expected integers of shape [{rows}, N]; put -1 behind the ids of shorter rows"
        ) from None
    fits = found.ndim == 2 and len(found) == rows and found.shape[1] > 0 and np.issubdtype(found.dtype, np.integer)
    if not fits:
        raise BadValue(
            f"{name} of dtype {found.dtype} and shape {found.shape}: expected integers of shape [B, N], B = {rows} and "
            "N >= 1"
        )
    if found.min() < -1 or found.max() >= vocab_size:
        wrong = found.min() if found.min() < -1 else found.max()
        raise BadValue(f"id {wrong} in {name}: expected 0 to {vocab_size - 1}, or -1 behind the ids of a row")
    if (np.diff((found >= 0).astype(np.int8), axis=1) > 0).any():
        raise BadValue(f"ids behind a -1 in {name}: expected -1 only behind all ids of a row")
    return found.astype(np.int32)

"""`jaxkv info`: a model's shape, the bytes of its caches, and the kernels that run."""

import dataclasses
import functools
import json
import tomllib
from typing import Any

from tyro.conf import Positional

from jaxkv.cli.options import DEFAULT_BUDGET, DEFAULT_MODEL, Cut, register
from jaxkv.errors import BadValue


@dataclasses.dataclass(frozen=True)
class Info:
    """A model's shape, and the bytes of a bounded cache against the full one."""

    model: Positional[str] = DEFAULT_MODEL
    budget: int | None = None
    """Tokens kept per KV head and layer (1024 when neither this nor --ratio nor --bytes nor the policy's file says)."""
    ratio: float | None = None
    """Fraction of the text removed, instead of a budget."""
    bytes: int | None = None
    """Bytes that the keys and values of one row may take, instead of a budget."""
    tokens: int = 8192
    """Length of the text: of the full cache, and what --ratio is a part of."""
    policy: str | None = None
    """A name from `jaxkv policies`, or a .toml file: what its cache takes, with statistics and what lies beside it."""
    option: tuple[str, ...] = ()
    """Options of the policy's parts, as of `jaxkv generate`."""
    parts: tuple[str, ...] = ()
    """Python files or modules that register parts of your own."""
    kernels: bool = False
    """Which implementation of each attention operation runs here, and why not a faster one."""
    batch: int = 1
    dtype: str = "float32"
    json: bool = False

    def __call__(self) -> int:
        import jax.numpy as jnp

        from jaxkv.checks import check_arguments
        from jaxkv.models import ModelConfig
        from jaxkv.store.entries import in_pieces
        from jaxkv.weights import load
        from jaxkv.weights.load import config_of
        from jaxkv.weights.source import locate

        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise BadValue(f"dtype {self.dtype!r}: expected float32, bfloat16 or float16")
        budget = DEFAULT_BUDGET if self.budget is None else self.budget
        check_arguments(budget=budget, tokens=self.tokens, batch=self.batch)
        shape = _shape_table(self.model)
        if shape is not None:
            config = ModelConfig.from_hf(shape)
        else:
            path = locate(self.model)
            config = config_of(path) if path.is_dir() else load(path).config
        policy = self._policy_of(config)
        if policy is not None and policy.evicts:
            budget = policy.mean_budget(self.tokens)
        size = jnp.dtype(self.dtype).itemsize
        bytes_per_token = [2 * s.num_kv_heads * s.head_dim * size for s in config.specs]

        def held(tokens: int) -> int:
            slots = [in_pieces(min(tokens, s.window or tokens)) for s in config.specs]
            return self.batch * sum(b * n for b, n in zip(bytes_per_token, slots, strict=True))

        facts = {
            "model": self.model,
            "family": config.family,
            "layers": config.num_layers,
            "query_heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "context": config.max_position,
            "dtype": self.dtype,
            "cache_bytes_per_token": self.batch * sum(bytes_per_token),
            f"full_cache_bytes_at_{self.tokens}_tokens": held(self.tokens),
            f"cache_bytes_at_budget_{budget}": held(min(budget, self.tokens)),
        }
        if policy is not None:
            facts |= self._cache_under(policy, budget, config)
        if self.kernels:
            facts |= self._kernels_for(policy, budget, config)
        if self.json:
            print(json.dumps(facts))
        else:
            width = max(map(len, facts))
            for name, value in facts.items():
                print(f"{name.replace('_', ' '):{width}} {f'{value:,}' if isinstance(value, int) else value}")
        return 0

    def _policy_of(self, config: Any) -> Any:
        """The policy that is asked about, its bytes as the budget that they hold; None where none is."""
        from jaxkv.sizes import fitted

        if self.policy is None:
            given = {"option": " ".join(self.option) or None, "ratio": self.ratio, "bytes": self.bytes}
            for name, value in given.items():
                if value is not None:
                    raise BadValue(f"--{name} {value} without --policy: say of which policy")
            register(self.parts)
            return None
        cut = Cut(self.policy, self.budget, self.ratio, self.bytes, self.option, self.parts)
        policy = cut.build()
        if policy.bytes is not None and policy.learns:
            raise BadValue(
                f"bytes of policy {policy.name!r}, whose layers' budgets were measured on a model: give --budget, or "
                "see out.cache.nbytes"
            )
        return fitted(policy, config, self.dtype)

    def _cache_under(self, policy: Any, budget: int, config: Any) -> dict[str, int]:
        """Bytes of the cache that a policy holds while it decodes, or leaves of a prompt where it adds every new token:
        all of it, and of it keys and values."""
        from jaxkv.sizes import least, size_of, slots_at
        from jaxkv.store.entries import in_pieces

        count, at = (budget, f"budget_{budget}") if policy.evicts else (self.tokens, f"{self.tokens}_tokens")
        if policy.evicts and not policy.learns and count >= least(policy):
            slots = slots_at(policy, config, count, self.tokens)
        else:  # what was measured of the layers is not at hand, as if they had equally many; or a ratio keeps it all
            slots = [in_pieces(min(count, spec.window or count)) for spec in config.specs]
        at += "_behind_the_prompt" * (policy.evicts and not policy.bounded)
        size = size_of(policy, config, self.dtype, slots)
        what = {"cache_bytes": size.all, "keys_and_values_bytes": size.keys_values}
        return {f"{key}_under_{policy.name}_at_{at}": self.batch * value for key, value in what.items()}

    def _kernels_for(self, policy: Any, budget: int, config: Any) -> dict[str, str]:
        """What runs of each attention operation in the model's first layer, as the policy holds its entries, and why
        others do not."""
        from jaxkv.store.reading import reading
        from jaxkv.store.sinks import read_apart
        from pallas_kernels.choices import choices

        codes, spec, turns, apart = None, config.specs[0], False, False
        if policy is not None:
            store, weighs = policy.store, policy.weighs_at_decode
            beside = {"windows": store.windows, "weighs": weighs, "on_mesh": False}
            alone = policy.rope == "sinks" and read_apart(policy.decoding.sinks, **beside)
            turns = policy.rope != "text" and not alone
            fitted = store.fitted(store.unfit(1, spec.num_kv_heads, spec.head_dim))
            how = reading(
                fitted, windows=store.windows, rotates=turns, capped=spec.softcap is not None,
                at_once=weighs and policy.allocate.pooled,
            )  # fmt: skip
            apart = weighs and (alone or (store.windows and how.codes))

            def form(codec: Any, x: Any) -> Any:
                return how.form(codec.fitted(codec.unfit(*x.shape[:2], x.shape[-1])), x)

            codes = functools.partial(form, store.keys), functools.partial(form, store.values)
        found = choices(
            heads=config.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, slots=budget,
            dtype=self.dtype, batch=self.batch, codes=codes, rotate=turns, apart=apart,
        )  # fmt: skip
        told = {name: (chosen.implementation, "; ".join(chosen.reasons)) for name, chosen in found.items()}
        return {name: f"{runs}, for {why}" if why else runs for name, (runs, why) in told.items()}


def _shape_table(model: str) -> dict[str, Any] | None:
    """The [config] table of a model that ships as a shape alone."""
    from jaxkv.configs import config_files

    file = config_files("models").get(model)
    return None if file is None else tomllib.loads(file.read_text(encoding="utf-8")).get("config")

"""What each policy of the catalogue is checked against, and the test that does it.

    python tests/checks.py

prints the table; each policy's page of the site's catalogue has its line. `test_checks.py` keeps it true.
"""

from typing import NamedTuple

CODE = "released code"  # a golden that the authors' own program made
KVPRESS = "kvpress"  # a golden that kvpress 0.5.5 made
FORM = "independent form"  # the rule written a second time, in plain NumPy or torch
KINDS = (CODE, KVPRESS, FORM)  # the contract alone is no check of a method

BOTH = "prefill, decode"  # what is kept, all parts together
PREFILL = "prefill"
DECODE = "decode"
PART = "its own part"  # the score or the share alone, not what the whole policy keeps


class Check(NamedTuple):
    """The strongest check of a policy: against what, of what, and by which test (`file::function` under tests/)."""

    against: str
    of: str
    test: str


TWINS = Check(KVPRESS, PREFILL, "test_family.py::test_kvpress_twins")
TINY = Check(KVPRESS, PREFILL, "test_parity.py::test_kvpress_on_tiny_models")
POOLS = Check(KVPRESS, PREFILL, "test_pool.py::test_kept_as_in_kvpress")
REPLAY = Check(KVPRESS, PREFILL, "test_family.py::test_replay_as_in_kvpress")
HEADS = Check(FORM, PREFILL, "test_head_budgets.py::test_kept_by_the_papers_rule")
RELEASED = Check(CODE, PREFILL, "test_released.py::test_what_a_prompt_leaves")
STEPS = Check(CODE, BOTH, "test_released.py::test_what_every_step_leaves")
FORMS = Check(FORM, BOTH, "test_forms.py::test_prompt_and_steps")

MERGED = Check(CODE, PART, "test_merging.py::test_merging_as_released")
FORMS_AT_DECODE = Check(FORM, DECODE, "test_forms.py::test_prompt_and_steps")

CODED = Check(FORM, PART, "test_codecs.py::test_a_method_holds_its_codes")
DIRECTIONS = Check(FORM, BOTH, "test_channels.py::test_a_method_holds_its_directions")
CHANNELS = Check(FORM, BOTH, "test_channels.py::test_a_method_keeps_its_channels")

SCOPE = Check(CODE, DECODE, "test_scope.py::test_a_layer_keeps_what_the_rule_says")

CHECKS: dict[str, Check | tuple[Check, ...]] = {
    "a2sf": Check(CODE, PREFILL, "test_released_scores.py::test_a2sf_as_released"),
    "ada-pyramidkv": FORMS,
    "adakv": RELEASED,
    "adakv-h2o": FORMS,
    "alisa": FORMS,
    "aquakv": Check(FORM, BOTH, "test_predicted.py::test_layers_by_an_independent_form"),
    "arkv": FORMS,
    "cake": Check(CODE, BOTH, "test_model_pool.py::test_cake_as_released"),
    "cam": (MERGED, FORMS),
    "capkv": TWINS,
    "chunk-topk": TWINS,
    "chunkkv": TWINS,
    "chunkkv-entropy": Check(KVPRESS, PART, "test_family.py::test_kvpress_twins"),
    "compactor": (Check(CODE, PREFILL, "test_released_scores.py::test_compactor_as_released"), FORMS),
    "compresskv": RELEASED,
    "critical-adakv": POOLS,
    "criticalkv": TWINS,
    "cskv": DIRECTIONS,
    "cur": TWINS,
    "d2o": (
        Check(CODE, DECODE, "test_d2o_oracle.py::test_steps_as_released"),
        Check(FORM, PREFILL, "test_model_pool.py::test_d2o"),
    ),
    "dapq": FORMS,
    "dapq-longflow": FORMS,
    "defensivekv": Check(CODE, PREFILL, "test_released_scores.py::test_defensivekv_as_released"),
    "duo": HEADS,
    "elastic-cache": (MERGED, Check(CODE, PART, "test_merging.py::test_elastic_cache_grows_as_released"), FORMS),
    "ems": FORMS,
    "epicache": Check(CODE, PREFILL, "test_released.py::test_epicache_block_by_block"),
    "expected-attention": TWINS,
    "expected-attention-stats": TWINS,
    "fastkv": RELEASED,
    "finch": (FORMS, Check(FORM, PART, "test_family.py::test_a_question_behind_every_block")),
    "freqkv": (
        Check(CODE, PART, "test_frequency.py::test_low_frequencies_as_released"),
        Check(FORM, BOTH, "test_frequency.py::test_a_text_that_is_cut_again_and_again"),
    ),
    "full": Check(CODE, BOTH, "test_released.py::test_the_full_cache_generates_what_transformers_does"),
    "gear": (
        Check(CODE, PART, "test_gear.py::test_blocks_as_released"),
        Check(FORM, BOTH, "test_gear.py::test_a_cache_of_blocks"),
    ),
    "global-h2o": Check(FORM, PREFILL, "test_model_pool.py::test_one_budget_for_all"),
    "graphkv": Check(FORM, PART, "test_family.py::test_neighbours_of_the_best_count_less"),
    "h2o": STEPS,
    "headkv": (HEADS, Check(CODE, PART, "test_head_budgets.py::test_headkv_as_released")),
    "keepkv": (MERGED, FORMS),
    "keydiff": (TWINS, FORMS_AT_DECODE),
    "kivi": (
        Check(CODE, PART, "test_codecs.py::test_codes_as_kivi_packs_them"),
        Check(FORM, BOTH, "test_codecs.py::test_blocks_of_a_text_are_those_of_its_tokens"),
    ),
    "knorm": TINY,
    "kv-adaquant": CODED,
    "kv-heads": DIRECTIONS,
    "kvcompose": Check(KVPRESS, PREFILL, "test_family.py::test_composite_tokens_as_in_kvpress"),
    "kvcrush": Check(FORM, PART, "test_family.py::test_an_even_sample_of_behaviour"),
    "kvmerger": FORMS,
    "kvzip": RELEASED,
    "kvzip-plus": REPLAY,
    "lacache": Check(CODE, BOTH, "test_family.py::test_lacache_as_released"),
    "lagkv": (RELEASED, FORMS_AT_DECODE),
    "laq": FORMS,
    "laq-h2o": FORMS,
    "laq-h2o-int4": FORMS,
    "laq-heads": FORMS,
    "laq-longflow": FORMS,
    "laq-plus-plus": FORMS,
    "laq32-h2o-int4": FORMS,
    "layer-compresskv": RELEASED,
    "layer-defensivekv": Check(CODE, PREFILL, "test_released_scores.py::test_defensivekv_as_released"),
    "lazyeviction": (
        Check(CODE, DECODE, "test_released.py::test_lazyeviction_up_to_its_first_eviction"),
        FORMS,
    ),
    "leank": CHANNELS,
    "leverage": FORMS,
    "longflow": Check(CODE, BOTH, "test_released.py::test_longflow_step_by_step"),
    "look-m": (MERGED, FORMS),
    "lu-kv": Check(KVPRESS, PREFILL, "test_head_budgets.py::test_curves_as_in_kvpress"),
    "mikv": FORMS,
    "minicache": Check(FORM, PREFILL, "test_pairs.py::test_a_prompt_is_joined_and_joined_again"),
    "mpcache": Check(FORM, PREFILL, "test_family.py::test_a_look_once"),
    "mustafar": CODED,
    "non-causal": FORMS,
    "prefixkv": Check(CODE, BOTH, "test_model_pool.py::test_prefixkv_as_released"),
    "pyramidkv": RELEASED,
    "q-filters": Check(CODE, BOTH, "test_released.py::test_q_filters_step_by_step"),
    "qaq": (
        Check(CODE, PART, "test_outliers.py::test_bits_as_released"),
        Check(CODE, PART, "test_outliers.py::test_slots_as_released"),
        FORMS,
    ),
    "qpruning": CODED,
    "quest": FORMS,
    "quickvideo": RELEASED,
    "r-kv": (
        Check(CODE, PREFILL, "test_released_scores.py::test_r_kv_as_released"),
        Check(FORM, DECODE, "test_released_scores.py::test_r_kv_cuts_with_the_last_queries"),
    ),
    "random": FORMS,
    "razorattention": HEADS,
    "rotatekv": Check(CODE, PART, "test_gear.py::test_ranges_as_rotatekv_clips_them"),
    "scope": SCOPE,
    "scope-adaptive": SCOPE,
    "scope-discontinuous": SCOPE,
    "simlayerkv": Check(KVPRESS, PREFILL, "test_released.py::test_simlayerkv_as_in_kvpress"),
    "snapkv": RELEASED,
    "spans": FORMS,
    "spans-longflow": FORMS,
    "squat": Check(CODE, PART, "test_channels.py::test_errors_are_turned_as_released"),
    "streaming-llm": Check(CODE, BOTH, "test_released.py::test_streaming_llm_step_by_step"),
    "subgen": Check(FORM, BOTH, "test_sketch.py::test_what_is_estimated"),
    "think": (
        Check(CODE, PART, "test_channels.py::test_channels_as_released"),
        Check(KVPRESS, PREFILL, "test_channels.py::test_channels_as_in_kvpress"),
    ),
    "tiered-h2o": Check(FORM, PART, "test_evicted.py::test_a_second_tier_holds_what_the_first_has_lost"),
    "tiered-laq": FORMS,
    "tova": STEPS,
    "treekv": FORMS,
    "value-merging": Check(KVPRESS, PART, "test_merging.py::test_merging_as_released"),
    "vatp": STEPS,
    "weightedkv": FORMS,
    "zipcache": (Check(CODE, PART, "test_evicted.py::test_zipcache_as_released"), FORMS),
    "zsmerge": (Check(CODE, PART, "test_merging.py::test_residual_slots_as_released"), FORMS),
}


def checks(name: str) -> tuple[Check, ...]:
    """One check, or one of the prompt and one of the steps after it."""
    found = CHECKS[name]
    return (found,) if isinstance(found, Check) else found


def table() -> str:
    """The checks as a table in Markdown."""
    rows = ["| policy | checked against | what of it | test |", "|---|---|---|---|"]
    for name in CHECKS:
        cells = zip(*((check.against, check.of, f"`{check.test}`") for check in checks(name)), strict=True)
        rows.append(f"| `{name}` | {' | '.join('; '.join(dict.fromkeys(cell)) for cell in cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())

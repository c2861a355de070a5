"""Tokenizers: of a Hugging Face folder as it is, of a GGUF file built from its metadata."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv.checks import fits
from jaxkv.errors import BadValue, BadWeights, UnknownName, unknown

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's kinds of tokens

# How text is cut before BPE merges bytes: published with each model's tokenizer
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "smollm": "digits",
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), LLAMA3),
    "tekken": TEKKEN,  # Mistral's since Nemo
    "gpt-2": None,
    "default": None,
}
WHOLE_WORDS = (LLAMA3, TEKKEN)  # take a word that is a token as it is, and begin texts with BOS
UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2"}  # of an architecture whose file names none


def from_folder(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder, or None when it has none. Raises `BadValue` when it can't be read."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    from transformers import AutoTokenizer

    try:
        # code in a folder is not run: it would ask for leave on the terminal
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every tokenizer class has its own
        raise BadValue(f"the tokenizer in {folder} can't be read: {type(error).__name__}: {error}") from error


def from_gguf(fields: Mapping[str, Any]) -> Any:
    """The tokenizer of GGUF metadata as a `PreTrainedTokenizerFast` with the file's chat template, or None.

    Byte-level BPE ("gpt2") with the pre-tokenizer the file names, and SentencePiece's BPE ("llama"). Raises as
    `described` does.
    """
    own = described(fields)
    if own is None:
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = BUILDERS[own["model"]](own)
    except Exception as error:  # of the library, which has one kind for all
        raise BadWeights(f"the GGUF file's tokenizer cannot be built: {error}; get the file again") from error
    tokens = _pieces(own)
    named = {
        role: tokens[own[f"{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in own
    }
    _frame(tokenizer, own, tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in named.items()},
    )


def described(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What GGUF metadata says of its tokenizer, None where that is nothing. Special tokens that the vocabulary has not
    are left out. Raises `UnknownName` for another model or pre-tokenizer, `BadWeights` for metadata that lacks what
    these need."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items() if "tokenizer.ggml." in key}
    if "model" not in own or "tokens" not in own:
        return None
    if own["model"] not in BUILDERS:
        raise unknown("GGUF tokenizer model", str(own["model"]), BUILDERS)
    lost = [f"tokenizer.ggml.{key}" for key in NEEDED[own["model"]] if key not in own]
    if lost:
        raise BadWeights(f"the GGUF metadata has no {', '.join(lost)}: get a complete file")
    tokens = own["tokens"]
    for key in ("token_type", "scores"):
        if key in own and len(own[key]) != len(tokens):
            raise BadWeights(
                f"tokenizer.ggml.{key} has {len(own[key])} entries, and there are {len(tokens)} tokens: the GGUF "
                "metadata is damaged, get the file again"
            )
    if own["model"] == "gpt2":
        guess = "llama-bpe" if "<|begin_of_text|>" in tokens else "default"
        own.setdefault("pre", UNNAMED.get(str(fields.get("general.architecture")), guess))
        if own["pre"] not in CUTS:
            error = unknown("GGUF pre-tokenizer", str(own["pre"]), CUTS)
            raise UnknownName(f"{error}; load the model's Hugging Face folder instead")
    special = {key for key in own if key.endswith("_token_id")}
    known = {key for key in special if fits(own[key], int) and 0 <= own[key] < len(tokens)}
    return {key: value for key, value in own.items() if key not in special - known}


def _byte_level(own: Mapping[str, Any]) -> Any:
    """GPT-2's BPE on bytes written as letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = own["pre"]
    merges = [tuple(merge.split(" ", 1)) for merge in own["merges"]]
    whole_words = CUTS[kind] in WHOLE_WORDS
    vocabulary = {token: index for index, token in enumerate(own["tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    space = own.get("add_space_prefix", False)
    if CUTS[kind] is None:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=space)
    elif CUTS[kind] == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        cut = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=space)])
    else:
        split = pre_tokenizers.Split(Regex(CUTS[kind]), behavior="isolated")
        cut = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)])
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    if CUTS[kind] is QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    _add(tokenizer, own, own["tokens"])
    return tokenizer


def _sentencepiece(own: Mapping[str, Any]) -> Any:
    """SentencePiece's BPE: spaces are written as "▁", pieces join in the order of their scores, the rest is bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = _pieces(own)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, own["scores"], own["token_type"])
    unk = own.get("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unk is None else tokens[unk],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if own.get("add_space_prefix", True):
        spaces = [normalizers.Prepend("▁"), *spaces]
        undo.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(undo)
    _add(tokenizer, own, tokens)
    return tokenizer


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
NEEDED = {"gpt2": ("token_type", "merges"), "llama": ("token_type", "scores")}


def _pieces(own: Mapping[str, Any]) -> Sequence[str]:
    """The tokens as the tokenizer spells them: GGUF writes user-defined runs of spaces plainly."""
    if own["model"] != "llama":
        return own["tokens"]
    kinds = own["token_type"]
    return [
        token.replace(" ", "▁") if kind == USER_DEFINED else token
        for token, kind in zip(own["tokens"], kinds, strict=True)
    ]


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way in which two pieces join to a third, best score of the third first."""
    known = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    index = {token: number for number, token in enumerate(tokens)}
    found = []
    for token, score in known.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                found.append((-score, index[token], index[left], index[right], (left, right)))
    found.sort()
    return [pair for *_, pair in found]


def _add(tokenizer: Any, own: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Control tokens and user-defined ones are found in the text before anything else."""
    from tokenizers import AddedToken

    kinds = own["token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    defined = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    # runs of "▁" are met after normalising, when spaces have become that
    tokenizer.add_tokens([AddedToken(token, special=False, normalized="▁" in token) for token in defined])


def _frame(tokenizer: Any, own: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Put BOS in front and EOS behind where the file says so."""
    from tokenizers import processors

    marks, begins = {}, own["model"] == "llama" or CUTS[own["pre"]] in WHOLE_WORDS
    for key in ("bos", "eos"):
        wanted = own.get(f"add_{key}_token", begins and key == "bos")
        if wanted and f"{key}_token_id" in own:
            marks[key] = own[f"{key}_token_id"]
    if not marks:
        return
    before = [tokens[marks["bos"]]] if "bos" in marks else []
    after = [tokens[marks["eos"]]] if "eos" in marks else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(tokens[number], number) for number in marks.values()],
    )

"""The tokenizer that a GGUF file describes, built with the `tokenizers` library."""

from typing import Any

from jaxkv.errors import BadWeights, unknown

CONTROL = 3  # GGUF token type of special tokens
USER_DEFINED = 4
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def from_gguf(meta: dict[str, Any], source: str) -> Any:
    """A transformers tokenizer with the file's vocabulary, special tokens and chat template.

    Raises `BadWeights` for a file without a vocabulary and `UnknownName` for a kind that is not built here.
    """
    from transformers import PreTrainedTokenizerFast

    get = lambda key: meta.get(f"tokenizer.ggml.{key}")  # noqa: E731
    if not get("tokens"):
        raise BadWeights(f"{source}: no vocabulary in the file; expected tokenizer.ggml.tokens")
    kinds = {"gpt2": _byte_level, "llama": _sentence_piece}
    if get("model") not in kinds:
        raise unknown("GGUF tokenizer model", str(get("model")), kinds)
    backend = kinds[get("model")](get)
    special = [index for index, kind in enumerate(get("token_type") or []) if kind == CONTROL]
    _add_special(backend, get, special)
    named = {
        f"{name}_token": get("tokens")[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := get(f"{key}_token_id")) is not None
    }
    if named.get("bos_token") and get("add_bos_token"):
        _prepend(backend, named["bos_token"], get("bos_token_id"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = meta.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(get: Any) -> Any:
    """Byte-level BPE; how text is first cut into words depends on the model."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = get("pre") or "default"
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), bytes_only],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), bytes_only],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    }
    if kind not in cut:
        raise unknown("GGUF pre-tokenizer", str(kind), cut)
    merges = [tuple(merge.split(" ", 1)) for merge in get("merges")]
    vocab = {token: index for index, token in enumerate(get("tokens"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut[kind])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(get: Any) -> Any:
    """SentencePiece BPE with byte fallback; the merges follow from the pieces' scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = get("tokens"), get("scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token[:cut], token[cut:]))
    merges.sort()
    model = models.BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=tokens[get("unknown_token_id") or 0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space = "▁"
    steps = [normalizers.Replace(" ", space)]
    if get("add_space_prefix"):
        steps.insert(0, normalizers.Prepend(" "))
    tokenizer.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if get("add_space_prefix") else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_special(backend: Any, get: Any, special: list[int]) -> None:
    from tokenizers import AddedToken

    tokens, kinds = get("tokens"), get("token_type") or []
    backend.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special])
    plain = [tokens[index] for index, kind in enumerate(kinds) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _prepend(backend: Any, token: str, index: int) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)]
    )

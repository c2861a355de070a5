# ruff: noqa: RUF001 (texts of many scripts)
"""SmolLM2-135M-Instruct from its GGUF in float32: token ids of varied texts, logits and greedy tokens of five prompts.

python tests/oracle/make_smollm2.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from common import GOLDENS, greedy, save, save_json
from prose import GARDEN, HARBOUR
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "The train leaves at seven. 12345",
    "",
    " ",
    "a",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "\ttab\t\ttabs",
    "line\nline\n\nparagraph\n\n\nmore",
    "windows\r\nline\r\nends",
    "   \n   \n  indented after blank lines",
    "1  2   3\n4\n\n5\n 6 \n  7\t8",
    "   12 34, ½2²3 Ⅷ9, ١٢٣ ٤٥",
    "a1b22c333 x_1 f(2) $5.00 50% 12:30 1st 2nd",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f(12))\n",
    "for (int i = 0; i < 10; ++i) { sum += a[i]; }",
    '{"key": [1, 2.5, -3e10, null, true], "text": "a \\"quoted\\" word"}',
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%smith%';",
    "x = 3.14159265358979; y = 2**64 = 18446744073709551616",
    "1 22 333 4444 55555 1,234,567.89",
    "2026-11-21T04:22:25Z",
    "v1.2.3-rc4+build.567",
    "I'm, you're, he's, we'll, they'd, I've, DON'T, CAN'T",
    "don\u2019t use \u201ccurly\u201d quotes \u2014 or do\u2026",
    "café naïve Ångström façade",
    "cafe\u0301 (combining accent)",
    "Größe, Straße, Übermut",
    "Привет, мир! Как дела?",
    "你好，世界！今天天气很好。",
    "日本語のテキスト、カタカナとひらがな。",
    "한국어 문장입니다.",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया ०१२३",
    "Emoji: 😀 👍🏽 👨‍👩‍👧‍👦 🇫🇷 ❤️",
    "math: ∑ᵢ xᵢ² ≤ ∫₀^∞ e^{−x} dx ½ Ⅷ",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic",
    "control \x00\x01\x1f chars \x7f",
    "!!!???...;;;:::---___===+++***///\\\\\\",
    "https://example.org/path?query=value&other=1#frag user@example.org",
    "CamelCaseWord snake_case_word SCREAMING_SNAKE kebab-case",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The quick brown fox jumps over the lazy dog.",
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>more <|im_start|> spaced <|im_end|>",
    "<|im_start|assistant not special <|im_end>",
    "<repo_name>x<file_sep>y<issue_start>z<jupyter_code>",
    GARDEN,
]

CHATS = [
    {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    {"messages": [{"role": "user", "content": "What is the capital of France?"}], "add_generation_prompt": False},
    {
        "messages": [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "What is the capital of France?"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue."},
            {"role": "user", "content": "  Another one,\nplease.  "},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "How can I help?"},
        ],
        "add_generation_prompt": False,
    },
]


def published_split(tokenizer) -> None:
    """Give the tokenizer the pre-tokenizer that the GGUF names (`smollm`): digits one by one, then byte level.

    transformers 5.2 reads no pre-tokenizer from a GGUF: it takes the byte-level one alone, which differs where
    several spaces or newlines stand before a digit, and it puts a BOS in front, which the GGUF says not to.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def prompts(tokenizer) -> dict[str, list[int]]:
    """Five prompts, from a few to about 300 tokens, plain and as a chat."""

    def plain(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    def chat(content: str) -> list[int]:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=False
        )

    return {
        "short": plain("The capital of France is"),
        "code": plain("def fibonacci(n):\n    if n < 2:\n        return n\n"),
        "chat": chat("Explain in two sentences why the sky is blue."),
        "medium": plain(GARDEN),
        "long": plain(HARBOUR),
    }


def main(path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    load = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**load)
    model = AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32, attn_implementation="eager").eval()

    as_read = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    published_split(tokenizer)
    chats = []
    for chat in CHATS:
        options = {"add_generation_prompt": chat.get("add_generation_prompt", True)}
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, **options)
        ids = tokenizer.apply_chat_template(chat["messages"], tokenize=True, return_dict=False, **options)
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
        chats.append({"messages": chat["messages"], **options, "text": text, "ids": ids})
    texts = []
    for text, before in zip(TEXTS, as_read, strict=True):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        texts.append({"text": text, "ids": ids} | ({} if before == ids else {"transformers_ids": before}))
    fields = gguf.GGUFReader(path).fields
    special = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos", "padding")}
    tokens = {"vocab_size": model.config.vocab_size, "special": special, "texts": texts, "chats": chats}
    save_json(GOLDENS / "smollm2" / "tokens.json", tokens)

    vocabulary = model.config.vocab_size
    some = np.sort(np.random.default_rng(0).choice(vocabulary, 64, replace=False)).astype(np.int32)
    arrays = {"vocabulary": some}
    for name, ids in prompts(tokenizer).items():
        batch = torch.tensor([ids])
        with torch.no_grad():
            logits = model(batch, use_cache=False).logits[0]
        tokens, gaps = greedy(model, batch, 64)
        with torch.no_grad():
            whole = model(torch.cat([batch[0], torch.from_numpy(tokens[0]).long()])[None], use_cache=False).logits[0]
        assert (whole[len(ids) - 1 : -1].argmax(-1).numpy() == tokens[0]).all(), (
            f"{name}: cache and full forward differ"
        )
        top = logits.topk(2, dim=-1).values
        arrays |= {
            f"{name}/ids": np.array(ids, np.int32),
            f"{name}/last": logits[-4:].numpy(),
            f"{name}/argmax": logits.argmax(-1).numpy().astype(np.int32),
            f"{name}/top2_gap": (top[:, 0] - top[:, 1]).numpy(),
            f"{name}/logsumexp": logits.logsumexp(-1).numpy(),
            f"{name}/some": logits[:, torch.from_numpy(some).long()].numpy(),
            f"{name}/greedy": tokens[0],
            f"{name}/greedy_gaps": gaps[0],
            f"{name}/greedy_min_gap": gaps.min(),
        }
        print(f"{name}: {len(ids)} tokens, smallest gap {gaps.min():.4f}: {tokenizer.decode(tokens[0])!r}")
    save(GOLDENS / "smollm2" / "logits.npz", arrays)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))

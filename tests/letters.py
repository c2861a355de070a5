"""Tokenizers without a file."""


class Letters:
    """A tokenizer whose token n is the character chr(n + 32): enough to test text without a file."""

    chat_template = "x"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) - 32 for letter in text]}

    def decode(self, tokens, **_):
        return "".join(chr(token + 32) for token in tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>" * add_generation_prompt


class Words(Letters):
    """Each letter is a word behind a space, and a text's first space is left out, as tokenizers like Llama 2's do."""

    def decode(self, tokens, **_):
        return "".join(" " + letter for letter in super().decode(tokens)).removeprefix(" ")

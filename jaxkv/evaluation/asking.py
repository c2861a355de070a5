"""An example and a question -> token ids, in the model's chat format, split where the context ends."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv.about import ids, parted
from jaxkv.errors import BadValue
from jaxkv.evaluation.example import Example, Question


def asked(tokenizer: Any, example: Example, question: Question) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids of the part that ends with the context, and of the rest: question, turn format, the answer's prefix.

    Each is tokenised by itself, so that the question seen after a compressed context has the same tokens as the one in
    a whole prompt. Between them is an empty line, unless the question begins with a line of its own or there is none. A
    model without a chat template gets the plain text, behind what its texts begin with, and so does an example that
    wants no chat: the last token of its context is then the rest, where it has no question. Raises `BadValue` without
    a tokenizer.
    """
    if tokenizer is None:
        raise BadValue("the tasks are text, but the model has no tokenizer: give a model folder that has one")
    if not example.chat:
        context, rest = ids(tokenizer, example.context, True), ids(tokenizer, question.text + question.prefix)
        return (context, rest) if len(rest) else (context[:-1], context[-1:])
    turns = [{"role": role, "content": content} for role, content in example.turns]
    context, rest = parted(tokenizer, turns, example.context, question.text)
    return ids(tokenizer, context, not getattr(tokenizer, "chat_template", None)), ids(
        tokenizer, rest + question.prefix
    )


def shortened(tokenizer: Any, example: Example, longest: int | None) -> Example:
    """The example with at most `longest` tokens of its context, as many from each end (LongBench's `pred.py`)."""
    tokens = ids(tokenizer, example.context)
    if longest is None or len(tokens) <= longest:
        return example
    ends = (tokens[: longest // 2], tokens[len(tokens) - (longest - longest // 2) :])
    texts = [tokenizer.decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=False) for each in ends]
    return dataclasses.replace(example, context="".join(texts))


def size(tokenizer: Any, example: Example) -> int:
    """Tokens of the example: context, its longest question, and the output that it forces."""
    context, _ = asked(tokenizer, example, example.questions[0])
    rest = max(len(asked(tokenizer, example, question)[1]) for question in example.questions)
    return len(context) + rest + (len(ids(tokenizer, example.output)) if example.output else 0)

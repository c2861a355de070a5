"""Text that grows token by token is the text of all tokens, whatever was settled before."""

import numpy as np
import pytest

from jaxkv.stop_strings import Growing, StopStrings, decoded

TEXT = "Grüße aus 東京 👩‍👩‍👧 and the train leaves at seven; naïve café — \n\n  12345 🚂🚃 the end. " * 6


@pytest.mark.some(1)
@pytest.mark.parametrize("step", [1, 3, 8, 50])
def test_the_text_is_that_of_all_tokens(smollm2, step):
    tokenizer = smollm2.tokenizer
    draw = np.random.default_rng(step)
    for ids in (tokenizer(TEXT)["input_ids"], draw.integers(0, smollm2.config.vocab_size, 300).tolist()):
        growing = Growing(tokenizer)
        for count in range(1, len(ids) + 1, step):
            assert growing.text(ids[:count]) == decoded(tokenizer, ids[:count])
        assert growing.text(ids) == StopStrings((), tokenizer).text(ids)
        assert growing._count > len(ids) // 2  # so the most of it was not decoded again


def test_without_a_tokenizer_there_is_no_text():
    assert Growing(None).text([1, 2, 3]) == ""

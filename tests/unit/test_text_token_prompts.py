"""Prompts of token ids: which are taken, and what is said of the first that is not."""

import pytest
from server_helpers import INFO, TOKENIZER

from cardan.core.text.preprocess import Preprocessor
from cardan.core.types.errors import InputError
from cardan.core.types.prompt import TokenPrompt

SIZE = INFO.vocab_size


def encode(token_ids):
    return Preprocessor(TOKENIZER, INFO).encode(TokenPrompt(token_ids=token_ids))


class Id(int):
    """An integer by inheritance."""


@pytest.mark.parametrize("token_ids", [[0], [SIZE - 1, 0, 3], (1, 2), [Id(2), 1]])
def test_ids_of_the_vocabulary_become_a_list(token_ids):
    found = encode(token_ids)
    assert type(found) is list
    assert found == list(token_ids)
    assert found is not token_ids


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([1, -1, SIZE], "token id -1 is out of range: the vocabulary has"),
        ([1, SIZE, -1], f"token id {SIZE} is out of range"),
        ([1, 10**30], "is out of range"),
        ([Id(2), SIZE], f"token id {SIZE} is out of range"),
        ([1, True], "token id True is not an integer"),
        ([True], "token id True is not an integer"),
        ([1, 2.0], "token id 2.0 is not an integer"),
        ([1, "2"], "token id '2' is not an integer"),
        ([1, None, -1], "token id None is not an integer"),
        ([], "the prompt holds no tokens"),
    ],
)
def test_the_first_that_is_wrong_is_named(token_ids, message):
    with pytest.raises(InputError, match=message) as caught:
        encode(token_ids)
    assert caught.value.field == "prompt"

import torch

from equipoise.data.readers.text import HashingTokenizer

TOKENIZER = HashingTokenizer(vocabulary_size=50, length=5)


def test_ids_are_fixed_for_ever_and_in_range():
    # the numbers themselves: a changed hash would silently make trained models useless
    assert 1 + 0xE8B7BE43 % 8191 == 1084  # the published CRC-32 of "a"
    assert HashingTokenizer(8192, 4)(["A good film"]).tolist() == [[1084, 4816, 4201, 0]]
    tokens = TOKENIZER([" ".join(f"word{i}" for i in range(200)), "", "\u00e9t\u00e9 \u4e2d\u6587 :)"])
    assert tokens.dtype == torch.int64
    assert tokens.shape == (3, 5)
    assert tokens.min() >= 0
    assert tokens.max() < 50
    assert tokens[0].min() > 0
    assert tokens[1].tolist() == [0] * 5


def test_tokens_of_a_text_do_not_depend_on_other_texts():
    assert torch.equal(TOKENIZER(["one two", "three four five"])[0], TOKENIZER(["one two"])[0])
    assert torch.equal(TOKENIZER(["ONE Two"]), TOKENIZER(["one two"]))

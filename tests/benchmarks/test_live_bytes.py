"""What a step and a start hold grows no more unnoticed: bytes of tensors, counted."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import live_bytes, tasks

SMALL_GPT2 = {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 64, "vocab_size": 8376}


def language(length: int, words: int, tied: bool = False) -> tasks.Task:
    model = tasks.LanguageModel(width=128, layers=2, words=words, length=length)
    if tied:
        model.head.weight = model.table.weight
    tokens = torch.randint(words, (16, length + 1))
    return tasks.Task(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tasks._language)


#: The task, and the most of plain training's bytes. Every forward holds two public records next to 16, 18 or
#: 64 private ones, or next to 4 (GPT-2).
STEPS = {
    "convolutions": (partial(tasks.resnet, 16, (16, 32, 64, 128), 2), 1.22),
    "long sequences": (partial(language, 128, 500), 1.17),
    "many words": (partial(language, 32, 12_500), 0.85),
    "many words, tied": (partial(language, 32, 12_500, tied=True), 0.8),
    "recurrent": (partial(tasks.recurrent, nn.LSTM, 32), 1.32),
    "gpt2": (partial(tasks.gpt2_small, 4, 24, **SMALL_GPT2), 1.16),
    "lora": (partial(tasks.gpt2_small, 4, 24, low_rank=True, **SMALL_GPT2), 1.2),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_holds_little_more_than_a_plain_one(name):
    make, most = STEPS[name]
    if name in ("gpt2", "lora"):
        pytest.importorskip("transformers", reason="needs an optional package")
    if name == "lora":
        pytest.importorskip("peft", reason="needs an optional package")
    found = {}
    for method in ("plain", "ours-training"):
        torch.manual_seed(0)
        found[method] = live_bytes.of_step(method, make())
    ratio = found["ours-training"] / found["plain"]
    assert ratio <= most


def test_a_step_of_few_records_holds_the_sums_and_their_noise():
    torch.manual_seed(0)
    task = tasks.mlp(16)
    lower_bits = 2**19  # of the radius of one block of noise, whatever the model's size
    most = 2.2 * live_bytes.parameter_bytes(task) + lower_bits
    assert live_bytes.of_step("ours-training", task) <= most


def test_a_start_holds_few_copies_of_the_parameters():
    pytest.importorskip("transformers", reason="needs an optional package")
    torch.manual_seed(0)
    task = tasks.gpt2_small(4, 8, **SMALL_GPT2)
    copies = live_bytes.of_start(task) / live_bytes.parameter_bytes(task)
    assert copies <= 4.9, copies

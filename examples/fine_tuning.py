"""Supervised fine-tuning with the Trainer: chat template, loss on completions only, rows packed by user.

    python examples/fine_tuning.py runs/shop [--plain] [--no-packing] [--users 2000] [--steps 60]

A small GPT-2 learns from public conversations how a shop answers, and then from private ones what fits what.
All conversations are made up here, and the model is built from its configuration: nothing is downloaded. Put
your model, tokenizer and conversations in their place. `--plain` takes the same steps with
`transformers.Trainer`, without privacy, as a comparison.

**The unit.** Packing joins conversations into one row, so a row is what the guarantee protects. Only
conversations of one user are joined here, and each user has one row: the unit is the user. Joining
conversations of several users would protect their accidental neighbours, and no user.
"""

import argparse
import json
import resource
import statistics
import time
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import equipoise as eq
from equipoise.data import PadTo
from equipoise.integrations.transformers import PrivateTrainer

ITEMS = [f"item{i}" for i in range(24)]
PARTS = [f"part{i}" for i in range(24)]
WORDS = ["[pad]", "[unk]", "[user]", "[shop]", "[end]", "what", "fits", "?", "take", "please", *ITEMS, *PARTS]
WIDTHS = (16, 32, 48)  # public: rows are padded to the first that is long enough
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[user] {{ message['content'] }} "
    "{% else %}[shop] {% generation %}{{ message['content'] }} [end] {% endgeneration %}"
    "{% endif %}{% endfor %}"
)


def make_tokenizer():
    """A word each: the vocabulary is public."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[pad]", "unk_token": "[unk]", "eos_token": "[end]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **special)


def conversations(users, seed, shift):
    """One to three of each user; item i fits part i + shift."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(users):
        asked = torch.randint(len(ITEMS), (int(torch.randint(1, 4, (), generator=rng)),), generator=rng)
        found.append(
            [
                [
                    {"role": "user", "content": f"what fits {ITEMS[i]} ?"},
                    {"role": "assistant", "content": f"take {PARTS[(i + shift) % len(PARTS)]} please"},
                ]
                for i in asked.tolist()
            ]
        )
    return found


def encoded(tokenizer, conversation):
    """Token ids, and labels that are -100 but for the tokens of completions."""
    found = tokenizer.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, is_completion = found["input_ids"], found["assistant_masks"]
    return ids, [token if mine else -100 for token, mine in zip(ids, is_completion, strict=True)]


class Rows(torch.utils.data.Dataset):
    """A row for each user, of all their conversations, cut at the largest width; or for each conversation."""

    def __init__(self, tokenizer, users, packed=True):
        self.rows, self.owner = [], []
        for number, mine in enumerate(users):
            parts = [encoded(tokenizer, one) for one in mine]
            if packed:
                parts = [tuple(list(chain(*both)) for both in zip(*parts, strict=True))]
            self.rows += parts
            self.owner += [number] * len(parts)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, labels = (torch.tensor(one[: WIDTHS[-1]]) for one in self.rows[i])
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def joined(rows):
    """A batch as wide as its longest row."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([row[name] for row in rows], True, value) for name, value in fill.items()}


#: Batches have one of three widths, whatever the records hold: each is traced once.
collate = PadTo(joined, WIDTHS, {"input_ids": 0, "labels": -100, "attention_mask": 0})


def arguments(folder, batch, steps, rate):
    return TrainingArguments(
        str(folder), per_device_train_batch_size=batch, max_steps=steps, learning_rate=rate, use_cpu=True,
        lr_scheduler_type="constant", eval_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, logging_steps=10**6, seed=0, remove_unused_columns=False, max_grad_norm=0.0,
    )  # fmt: skip


def pretrained(folder, tokenizer, steps):
    """A model that knows how the shop talks, from public conversations; in place of `from_pretrained`."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=WIDTHS[-1], n_embd=64, n_layer=2, n_head=2,
        bos_token_id=4, eos_token_id=4, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    public = Rows(tokenizer, conversations(500, seed=1, shift=0))
    Trainer(model, arguments(folder / "public", 64, steps, 3e-3), collate, public).train()
    return model


class StepTimes(TrainerCallback):
    """Processor time between the ends of steps."""

    def __init__(self):
        self.seconds, self.last = [], None

    def on_step_end(self, args, state, control, **_):
        now = time.process_time()
        self.seconds += [] if self.last is None else [now - self.last]
        self.last = now


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", action="store_true", help="transformers.Trainer, without privacy")
    parser.add_argument("--no-packing", action="store_true", help="a row for each conversation")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--public-steps", type=int, default=150)
    given = parser.parse_args(words)
    tokenizer, packed = make_tokenizer(), not given.no_packing
    model = pretrained(given.folder, tokenizer, given.public_steps)
    private = Rows(tokenizer, conversations(given.users, seed=2, shift=5), packed)
    test = Rows(tokenizer, conversations(300, seed=3, shift=5), packed)  # public
    asked = arguments(given.folder / "private", given.batch_size, given.steps, 2e-3)
    rows = {"data_collator": collate, "train_dataset": private, "eval_dataset": test}
    if given.plain:
        trainer = Trainer(model, asked, **rows)
    else:
        # without packing a user has up to three rows
        unit = "record" if packed else eq.Users(private.owner, records_per_user=3)
        trainer = PrivateTrainer(
            model, asked, population=given.users * (1 if packed else 2), unit=unit,  # public
            budget=eq.Budget(epsilon=8.0, delta=1e-5), method=eq.DPSGD(clip_norm=1.0), **rows,
        )  # fmt: skip
    steps = StepTimes()
    trainer.add_callback(steps)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found = {
        "unit": "none" if given.plain else "user",
        "epsilon": None if given.plain else trainer.statement().epsilon,
        "loss_before": before,
        "loss": trainer.evaluate()["eval_loss"],
        "cpu_ms_per_step": 1000 * statistics.median(steps.seconds),
        "largest_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    question = tokenizer("[user] what fits item3 ? [shop]", return_tensors="pt")
    said = model.generate(**question, max_new_tokens=3, do_sample=False)
    found["item3"] = tokenizer.decode(said[0, -3:])
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()

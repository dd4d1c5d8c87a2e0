"""Train a small BERT on sentences of SST-2 with a private Trainer.

The folder of its files is the argument.
"""

import gzip
import json
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import equipoise as eq
from equipoise.integrations.transformers import PrivateTrainer

RECORDS, EPOCHS, BATCH, RATE, WORDS, LENGTH = 67_349, 3, 1024, 2e-2, 4096, 32


class Sentences(torch.utils.data.Dataset):
    """Token ids by a public hash of the words, padded to a fixed width."""

    def __init__(self, path):
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()[1 : RECORDS + 1]
        self.rows = [line.split("\t") for line in lines]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, label = self.rows[i]
        ids = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()[:LENGTH]]
        ids = torch.tensor(ids + [0] * (LENGTH - len(ids)))
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": int(label)}


def network():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(folder, output):
    train_set, dev_set = Sentences(folder / "train.tsv.gz"), Sentences(folder / "dev.tsv.gz")
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=RATE,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = PrivateTrainer(
        network(),
        arguments,
        train_dataset=train_set,
        eval_dataset=dev_set,
        compute_metrics=accuracy,
        population=RECORDS,
        budget=eq.Budget(epsilon=8.0, delta=1e-6),
        method=eq.DPSGD(clip_norm=4.0),
    )
    trainer.train()
    print(
        json.dumps({"accuracy": trainer.evaluate()["eval_accuracy"], "epsilon": trainer.statement().epsilon})
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        main(Path(sys.argv[1]), output)

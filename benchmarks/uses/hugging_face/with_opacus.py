"""Train a small BERT on sentences of SST-2 with Opacus, which has no Trainer.

The folder of its files is the argument.
"""

import gzip
import json
import sys
import zlib
from pathlib import Path

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

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


def accuracy(model, data):
    model.eval()
    hits = 0
    with torch.no_grad():
        for batch in DataLoader(data, BATCH):
            labels = batch.pop("labels")
            hits += (model(**batch).logits.argmax(1) == labels).sum().item()
    model.train()
    return hits / len(data)


def main(folder):
    train_set, dev_set = Sentences(folder / "train.tsv.gz"), Sentences(folder / "dev.tsv.gz")
    loader = DataLoader(train_set, BATCH, shuffle=True)
    model = network().train()
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)  # else Opacus fails
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=8.0,
        target_delta=1e-6,
        epochs=EPOCHS,
        max_grad_norm=4.0,
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: accuracy {accuracy(model, dev_set):.4f}")
    print(json.dumps({"accuracy": accuracy(model, dev_set), "epsilon": engine.get_epsilon(1e-6)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The bridge for `transformers.Trainer`: its parameters are those of `PrivateTraining`, bit for bit."""

import json

import pytest
import torch
import torch.nn.functional as F
from flat_arguments import arranged

import equipoise as eq
from equipoise.gradients import CrossRecordError
from equipoise.statements.assumptions import CHANGED

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="needs the extra hf")

from equipoise.integrations.transformers import (  # noqa: E402
    REFUSED,
    PrivateTrainer,
    record_losses,
)

WORDS, LENGTH, COUNT = 30, 10, 64


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=LENGTH, num_labels=2, **options,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2,
        **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count=COUNT, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, WORDS, (count, LENGTH), generator=rng)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids[0] % 2,
            "note": "unused",
        }


def arguments(folder, **options):
    usual = {
        "per_device_train_batch_size": 16, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 2,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "warmup_steps": 2,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **(usual | options))


OWN = (
    "callbacks", "compute_metrics", "data_collator", "eval_dataset", "loss", "method", "budget", "journal",
    "reproducible",
)  # fmt: skip


def trainer_of(folder, model=None, data=None, **options):
    own = {name: options.pop(name) for name in OWN if name in options}
    usual = {"method": eq.DPSGD(clip_norm=0.5, noise_multiplier=0.8), "reproducible": True}
    given = arranged(train_dataset=data or Sentences(), population=COUNT, **(usual | own))
    return PrivateTrainer(model or bert(), arguments(folder, **options), **given)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def collated(items):
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.stack([item[name] for item in items]) for name in names}


@pytest.mark.parametrize("half", [False, True], ids=["alone", "evaluated in bfloat16"])
def test_parameters_are_those_of_private_training(tmp_path, half):
    options = {"bf16": half}
    if half:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Sentences(20, seed=1)}
    trainer = trainer_of(tmp_path, **options)
    trainer.train()

    def loss(model, batch):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")

    model = bert().train()
    decayed = trainer.get_decay_parameter_names(model)
    named = [*model.named_parameters()]
    kept = [p for name, p in named if name not in decayed]
    groups = [[p for name, p in named if name in decayed], kept]
    optimizer = torch.optim.AdamW([{"params": p, "weight_decay": 0.0} for p in groups], lr=1e-2, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    training = eq.PrivateTraining(
        model, optimizer, loss=loss, data=eq.Data(Sentences(), collate=collated),
        sampling=eq.Poisson(expected_batch_size=16, population=COUNT, steps=6),
        method=eq.DPSGD(clip_norm=0.5, noise_multiplier=0.8),
        run=eq.Run(scheduler=schedule, seed=42, reproducible=True),
    )  # fmt: skip
    training.run(progress=False)
    assert torch.equal(flat(trainer.model), flat(model))
    assert trainer.statement().releases == training.statement().releases
    assumed = {*training.statement().assumptions}
    more = [text for text in trainer.statement().assumptions if text not in assumed]
    # accelerate puts a forward under autocast in the place of the model's, which is tried and traced anew
    assert all("evaluate(model)" in text or text == CHANGED + "forward" for text in more)


def test_evaluation_is_published_with_its_assumption(tmp_path):
    trainer = trainer_of(
        tmp_path, eval_strategy="steps", eval_steps=3, compute_metrics=accuracy, eval_dataset=Sentences(20, 1)
    )
    trainer.train()
    rows = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in trainer.state.log_history for name in row if not name.startswith("eval_")}
    assert names <= {
        "learning_rate", "clip_norm", "released_norm", "noise_norm", "epsilon", "delta", "epoch", "step"
    }  # fmt: skip
    evaluated = [row for row in rows if "evaluation.eval_accuracy" in row]
    assert [row["step"] for row in evaluated] == [3, 6]
    assert not any("runtime" in name for row in rows for name in row)
    assert any("public" in text and "evaluat" in text.lower() for text in trainer.statement().assumptions)


def test_the_best_step_of_a_private_score_is_what_is_published(tmp_path):
    score = eq.Score("accuracy", share=0.3)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(
        tmp_path, eval_dataset=score, method=eq.DPSGD(clip_norm=0.5), budget=eq.Budget(8.0, 1e-3),
        load_best_model_at_end=True, callbacks=[Stop(4)], **options,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="noise alone"):
        trainer.train()
    (row,) = [row for row in trainer.statement().releases if row["name"] == "private score"]
    assert (row["used"], row["count"], row["apart"]) == (2, 3, True)
    taken = [row for row in trainer.state.log_history if "eval_private_accuracy" in row]
    assert [row["step"] for row in taken] == [2, 4]
    best = max(taken, key=lambda row: row["eval_private_accuracy"])
    assert trainer.state.best_global_step == best["step"]
    saved = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / f"checkpoint-{best['step']}"
    )
    published = eq.load_model(bert(), trainer.run_dir)
    assert torch.equal(flat(published), flat(saved))
    assert torch.equal(flat(trainer.model), flat(saved))
    with pytest.raises(RuntimeError, match="which train"):
        trainer.evaluate()


class Stop(transformers.TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.at
        return control


def test_a_stopped_or_killed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    options = {"save_strategy": "steps", "save_steps": 2}
    stopping = Stop(4)
    trainer = trainer_of(tmp_path / "cut", callbacks=[stopping], **options)
    trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "cut/checkpoint-4/model.safetensors").exists()
    with pytest.raises(FileExistsError, match="resume_from_checkpoint=True"):
        trainer_of(tmp_path / "cut").train()
    with pytest.raises(ValueError, match="is not the run folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-4"))
    stopping.at = 100
    trainer.add_callback(Fail())
    with pytest.raises(OSError, match="killed"):  # the same object, one step behind its checkpoint
        trainer.train(resume_from_checkpoint=True)
    trainer.private_training.close()
    trainer = trainer_of(tmp_path / "cut", **options)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(flat(trainer.model), flat(whole.model))
    assert trainer.statement().releases == whole.statement().releases


class Fail(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise OSError("killed")


def test_the_model_is_saved_with_its_statement(tmp_path):
    trainer = trainer_of(tmp_path / "out")
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    assert torch.equal(flat(again), flat(trainer.model))
    statement = json.loads((tmp_path / "model/statement.json").read_text())
    assert statement["guarantee"] == trainer.statement().guarantee
    trainer.create_model_card(model_name="small")
    card = (tmp_path / "out/README.md").read_text()
    assert card.count("## Differential privacy") == 1
    assert trainer.statement().sections()[0][1][0] in card


OTHER_VALUES = {
    "data_seed": 1, "debug": "underflow_overflow", "deepspeed": {"train_batch_size": 1}, "fsdp": "full_shard",
    "include_num_input_tokens_seen": "all", "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0,
    "skip_memory_metrics": False, "torch_empty_cache_steps": 1, "train_sampling_strategy": "sequential",
    "parallelism_config": object(), "max_grad_norm": 0.3, "lr_scheduler_type": "reduce_lr_on_plateau",
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, "max_grad_norm", "lr_scheduler_type"])
def test_an_argument_that_does_not_go_with_private_steps_is_refused_by_name(tmp_path, name):
    given = arguments(tmp_path)
    assert hasattr(given, name)
    object.__setattr__(given, name, OTHER_VALUES.get(name, True))
    with pytest.raises(ValueError, match=rf"TrainingArguments\({name}="):
        PrivateTrainer(bert(), given, train_dataset=Sentences(), population=COUNT)


def test_what_belongs_to_the_other_loop_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    for call in (trainer.training_step, trainer.get_train_dataloader, trainer.hyperparameter_search):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(RuntimeError, match="secret key"):
        trainer.push_to_hub()
    with pytest.raises(ValueError, match=r"loss=\.\.\., a function"):
        PrivateTrainer(bert(), arguments(tmp_path), population=COUNT, compute_loss_func=max)
    with pytest.raises(ValueError, match="eval_dataset holds private records"):
        trainer_of(tmp_path, eval_dataset=torch.utils.data.Subset(data := Sentences(), [3]), data=data)
    with pytest.raises(ValueError, match="eval_dataset holds private records"):
        trainer_of(tmp_path, data=data).evaluate(data)

    class Own(PrivateTrainer):
        def compute_loss(self, *args, **kwargs):
            raise AssertionError

    with pytest.raises(TypeError, match="compute_loss would not be called"):
        Own(bert(), arguments(tmp_path), population=COUNT)


def test_users_are_the_values_of_a_column_that_the_model_does_not_take(tmp_path):
    """As `PrivateTraining` with the same owners, bit for bit; a batch counts users where these are drawn."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    items = [{**Sentences()[i], "patient": f"p{i // 4}"} for i in range(COUNT)]
    columns = {name: [item[name] for item in items] for name in items[0] if name != "note"}
    columns = {k: [v.tolist() if torch.is_tensor(v) else v for v in c] for k, c in columns.items()}
    found = []
    for owner in ("patient", columns["patient"]):
        unit = eq.Users(owner, records_per_user=2, rows="mean")
        method = eq.DPSGD(clip_norm=0.5, noise_multiplier=0.8)
        trainer = PrivateTrainer(
            bert(),
            arguments(tmp_path / str(type(owner)), per_device_train_batch_size=8),
            collated,
            datasets.Dataset.from_dict(columns).with_format("torch"),
            unit=unit, method=method, population=COUNT // 4, run=eq.Run(reproducible=True),
        )  # fmt: skip
        trainer.train()
        found.append(flat(trainer.model))
        statement = trainer.statement()
        assert (statement.unit, statement.users) == ("user", {"records": 2, "rows": "mean"})
    assert torch.equal(*found)


def check_loss(model, batch):
    """On single records the mean loss of the model is the loss of the record."""
    found = record_losses(model.eval(), batch)
    for i in range(len(found)):
        record = {name: value[i : i + 1] for name, value in batch.items()}
        torch.testing.assert_close(found[i], model(**record).loss.detach(), check_dtype=False)


def tokens(count=3):
    return torch.randint(3, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_usual_losses_are_those_of_the_models():
    ids, some = tokens(), tokens().masked_fill(tokens() % 3 == 0, -100)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes)
    check_loss(bert(), {"input_ids": ids, "labels": ids[:, 0] % 2})
    check_loss(gpt2(), {"input_ids": ids, "labels": some})
    check_loss(transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": some})
    check_loss(transformers.BertForTokenClassification(config), {"input_ids": ids, "labels": some % 2})
    config.num_labels = 1
    number = {"input_ids": ids, "labels": ids[:, 0].float()}
    check_loss(transformers.BertForSequenceClassification(config), number)
    config.num_labels, config.problem_type = 3, "multi_label_classification"
    several = {"input_ids": ids, "labels": (ids[:, :3] % 2).float()}
    check_loss(transformers.BertForSequenceClassification(config), several)
    config.problem_type = "regression"
    check_loss(transformers.BertForSequenceClassification(config), several)
    t5 = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    check_loss(transformers.T5ForConditionalGeneration(t5), {"input_ids": ids, "labels": some})


class Normed(torch.nn.Module):
    """A pretrained norm that stays as it is, in front of what is trained."""

    def __init__(self, norm_mode):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(LENGTH).requires_grad_(False).train(norm_mode)
        self.last = torch.nn.Linear(LENGTH, 2)

    def forward(self, input_ids, labels=None):
        logits = self.last(self.norm(input_ids.float()))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_frozen_norm_stays_in_the_mode_that_it_has(tmp_path):
    def loss(model, batch):
        return F.cross_entropy(model(**batch)["logits"], batch["labels"], reduction="none")

    model = Normed(norm_mode=False)
    model.last.eval()
    trainer_of(tmp_path / "run", model, loss=loss, max_steps=2).train()
    assert not model.norm.training
    assert model.last.training
    with pytest.raises(CrossRecordError, match=r"eval\(\)"):
        trainer_of(tmp_path / "other", Normed(norm_mode=True), loss=loss, max_steps=2).train()


@pytest.mark.skipif(
    not hasattr(transformers.TrainingArguments, "train_sampling_strategy"), reason="an older name"
)
def test_draws_are_sorted_by_the_public_lengths_of_the_collator(tmp_path):
    rng, seen = torch.Generator().manual_seed(0), []
    ids = [torch.randint(3, WORDS, (length,), generator=rng) for length in [3, 4, 9] * 20]
    data = [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one[0] % 2} for one in ids]

    def joined(items):
        width = max(len(item["input_ids"]) for item in items)
        seen.append({len(item["input_ids"]) <= 4 for item in items})
        padded = [{k: F.pad(v, (0, width - len(v))) if v.ndim else v for k, v in i.items()} for i in items]
        return torch.utils.data.default_collate(padded)

    collate = eq.data.PadTo(joined, (4, LENGTH), {"input_ids": 0, "attention_mask": 0})
    given = {"data": data, "train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, **given, max_steps=2, data_collator=collate)
    trainer.train()
    assert all(len(lengths) == 1 for lengths in seen[-8:])
    with pytest.raises(ValueError, match="needs public lengths"):
        trainer_of(tmp_path / "other", **given, max_steps=2).train()

"""Lightning's Trainer with private steps: parameters are those of `PrivateTraining`, bit for bit."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from flat_arguments import arranged
from torch.nn import functional as F

import equipoise as eq
from equipoise.gradients import CrossRecordError
from equipoise.statements.assumptions import CHANGED, Assumption

lightning = pytest.importorskip("lightning", reason="needs the extra lightning")

from equipoise.integrations.lightning import REFUSED_HOOKS, fit  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "training"))
from small_problems import network, records  # noqa: E402


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", module="lightning")


class Classifier(lightning.LightningModule):
    def __init__(self, interval="step"):
        super().__init__()
        self.net, self.interval, self.started = network(seed=1), interval, 0

    def training_step(self, batch, index):
        raise AssertionError("it sees private records")

    def on_fit_start(self):
        self.started += 1

    def validation_step(self, batch, index):
        score = (self.net(batch["input"]).argmax(1) == batch["label"]).float().mean()
        self.log("val_accuracy", score, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def loss(module, batch):
    return F.cross_entropy(module.net(batch["input"]), batch["label"], reduction="none")


class Rows(lightning.pytorch.loggers.logger.Logger):
    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def trainer_of(folder, **options):
    usual = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "default_root_dir": folder,
    }  # fmt: skip
    return lightning.Trainer(**(usual | options))


SAMPLING = eq.Poisson(expected_batch_size=12, population=60, steps=8)
PRIVATE = {"method": eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0), "reproducible": True}


def fitted(trainer, module, **options):
    usual = {"loss": loss, "data": records(), "sampling": SAMPLING} | PRIVATE
    return fit(trainer, module, **arranged(**(usual | options)))


def public():
    return torch.utils.data.DataLoader(
        [{name: values[i] for name, values in records(20, seed=3).items()} for i in range(20)], batch_size=10
    )


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("is_validated", [False, True])
def test_parameters_are_those_of_private_training(tmp_path, is_validated):
    module, alone = Classifier(), Classifier()
    found = fitted(trainer_of(tmp_path), module, val_dataloaders=public() if is_validated else None)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    given = {"loss": loss, "data": records(), "sampling": SAMPLING, "scheduler": scheduler} | PRIVATE
    training = eq.PrivateTraining(alone, optimizer, **arranged(**given))
    training.run(progress=False)
    assert torch.equal(flat(module), flat(alone))
    more = {*found.statement().assumptions} - {*training.statement().assumptions}
    # After the first step `started` is another, which a trace takes for constant.
    wanted = {CHANGED + "started"} | ({Assumption.EVALUATED} if is_validated else set())
    assert more == wanted
    assert type(module) is Classifier
    assert module.automatic_optimization
    assert module.started == 1


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_records_are_converted_to_the_precision_of_the_trainer(tmp_path, precision, dtype):
    given, converted = Classifier(), Classifier()
    data = {"input": records()["input"].to(dtype), "label": records()["label"]}
    fitted(trainer_of(tmp_path, precision=precision), given)
    fitted(trainer_of(tmp_path, precision=precision), converted, data=data)
    assert flat(given).dtype == dtype
    assert torch.equal(flat(given), flat(converted))


def test_loggers_get_publishable_numbers(tmp_path):
    """And nothing that a loss logs of private records."""
    rows = Rows()

    def logging_loss(module, batch):
        found = loss(module, batch)
        module.log("private_loss", found.mean())
        return found

    trainer, given = trainer_of(tmp_path, logger=rows), {"loss": logging_loss, "folder": tmp_path / "run"}
    with pytest.warns(UserWarning, match="trainer. reference is not registered"):
        training = fitted(trainer, Classifier(), val_dataloaders=public(), **given)
    assert [step for step, row in rows.rows if "released_norm" in row] == list(range(8))
    names = {name for _, row in rows.rows for name in row}
    assert names <= {
        "learning_rate", "clip_norm", "released_norm", "noise_norm", "epsilon", "val_accuracy", "epoch",
    }  # fmt: skip
    assert trainer.global_step == 8
    assert any("evaluate" in text for text in training.statement().assumptions)
    written = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    # An epoch is five steps, and the plan has eight.
    assert [row["step"] for row in written if "evaluation.val_accuracy" in row] == [5, 8]
    assert eq.verify_run(tmp_path / "run").consistent


class Fail(lightning.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 6:
            raise OSError("killed")


def test_a_run_goes_on_from_its_folder(tmp_path):
    whole, cut = Classifier(), Classifier()
    fitted(trainer_of(tmp_path), whole)
    folder = {"folder": tmp_path / "run", "checkpoint_every": 4}
    with pytest.raises(OSError, match="killed"):
        fitted(trainer_of(tmp_path, callbacks=[Fail()]), cut, **folder)
    assert type(cut) is Classifier
    again = Classifier()
    training = fitted(trainer_of(tmp_path), again, resume=True, **folder)
    assert torch.equal(flat(again), flat(whole))
    assert training.statement().releases[0]["used"] == 8


REFUSED = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "overfit_batches": 1, "fast_dev_run": True}


@pytest.mark.parametrize(("option", "value"), REFUSED.items())
def test_a_setting_that_does_not_go_with_private_steps_is_refused_by_name(tmp_path, option, value):
    with pytest.raises(ValueError, match=rf"Trainer\({option}="):
        fitted(trainer_of(tmp_path, **{option: value}), Classifier())


@pytest.mark.parametrize("hook", [name for names in REFUSED_HOOKS for name in names])
def test_a_hook_that_no_private_step_calls_is_refused_by_name(tmp_path, hook):
    """Of a module, and of a callback that the module brings."""
    own = {hook: lambda *_: None}
    hooked = [type("Hooked", (Classifier,), own)]
    if hasattr(lightning.Callback, hook):
        callback = type("Hooked", (lightning.Callback,), own)
        hooked.append(type("Bringing", (Classifier,), {"configure_callbacks": lambda _: callback()}))
    for kind in hooked:
        with pytest.raises(TypeError, match=rf"Hooked\.{hook} would not be called"):
            fitted(trainer_of(tmp_path), kind())


def test_a_callback_that_averages_weights_is_refused_by_name(tmp_path):
    class Own(lightning.pytorch.callbacks.StochasticWeightAveraging):
        pass

    with pytest.raises(ValueError, match=r"callback Own .*ema_decay="):
        fitted(trainer_of(tmp_path, callbacks=[Own(1e-2)]), Classifier())


def test_validation_on_private_records_is_refused_before_a_step(tmp_path):
    data = records()
    held = torch.utils.data.TensorDataset(data["input"][50:], data["label"][50:])
    given = {"data": data, "val_dataloaders": [torch.utils.data.DataLoader(held)], "folder": tmp_path / "r"}
    with pytest.raises(ValueError, match="val_dataloaders holds private records"):
        fitted(trainer_of(tmp_path, num_sanity_val_steps=0), Classifier(), **given)
    assert not (tmp_path / "r/metrics.jsonl").exists()


class Move(lightning.Callback):
    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.net[0].weight.zero_()


def test_a_run_whose_end_fails_goes_on_in_the_same_process(tmp_path):
    whole, again = Classifier(), Classifier()
    fitted(trainer_of(tmp_path), whole)
    with pytest.raises(RuntimeError, match="parameters of the model changed"):
        fitted(trainer_of(tmp_path, callbacks=[Move()]), Classifier(), folder=tmp_path / "run")
    fitted(trainer_of(tmp_path), again, resume=True, folder=tmp_path / "run")
    assert torch.equal(flat(again), flat(whole))


class Normed(Classifier):
    """A pretrained norm that stays as it is, in front of what is trained."""

    def __init__(self, norm_mode):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(records()["input"].shape[1]).requires_grad_(False).train(norm_mode)


def of_normed(module, batch):
    inputs = module.norm(batch["input"])
    return F.cross_entropy(module.net(inputs), batch["label"], reduction="none")


def test_a_frozen_norm_stays_in_the_mode_that_it_has(tmp_path):
    module = Normed(norm_mode=False)
    module.net.eval()
    fitted(trainer_of(tmp_path, max_steps=2), module, loss=of_normed)
    assert not module.norm.training
    assert module.net.training
    with pytest.raises(CrossRecordError, match=r"eval\(\)"):
        fitted(trainer_of(tmp_path, max_steps=2), Normed(norm_mode=True), loss=of_normed)


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.critic, self.generator = torch.nn.Linear(2, 1), torch.nn.Linear(1, 2)

    def configure_optimizers(self):
        both = (self.critic, torch.optim.SGD), (self.generator, torch.optim.Adam)
        return [kind(part.parameters(), lr=0.1) for part, kind in both]


def against_samples(module, batch):
    made = module.generator(batch["draw"]).detach()
    return (module.critic(made) - module.critic(batch["input"]))[:, 0]


def test_a_generator_moves_between_the_private_steps_of_its_critic(tmp_path):
    """As in a loop of one's own, to the bit; the public step is named, and the published model is whole."""
    torch.manual_seed(0)
    data = {"input": torch.randn(60, 2), "draw": torch.randn(60, 1)}
    module, alone = Gan(), Gan()

    def public_step(module):
        optimizer = getattr(module, "own", None) or module.trainer.optimizers[1]
        optimizer.zero_grad()
        (-module.critic(module.generator(torch.linspace(-1, 1, 8)[:, None])).mean()).backward()
        optimizer.step()

    options = {"loss": against_samples, "data": data, "sampling": SAMPLING} | PRIVATE
    found = fit(
        trainer_of(tmp_path), module, public_step=public_step, **arranged(folder=tmp_path / "r", **options)
    )
    critic, alone.own = alone.configure_optimizers()
    alone.generator.requires_grad_(False)
    training = eq.PrivateTraining(alone, critic, **arranged(**options))
    for _ in training:
        alone.generator.requires_grad_(True)
        training.public_step(lambda: public_step(alone))
        alone.generator.requires_grad_(False)
    assert torch.equal(flat(module), flat(alone))
    assert not torch.equal(flat(module.generator), flat(Gan().generator))
    assert any("public_step moved the parameters 8 times" in text for text in found.statement().assumptions)
    loaded = eq.load_model(Gan(), tmp_path / "r")
    assert torch.equal(flat(loaded), flat(module))
    assert eq.verify_run(tmp_path / "r").consistent
    with pytest.raises(ValueError, match="public_step="):
        fit(trainer_of(tmp_path), Gan(), **arranged(**options))

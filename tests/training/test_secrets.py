"""Where the secrets of a run are: nowhere in its files but in the key, and after the end nowhere at all."""

import base64
import json
import stat

import pytest
import torch
from small_problems import loss, network, parameters, records, resumed, saved, training

import equipoise as eq
from equipoise.methods import ReleasedQuantile
from equipoise.privacy import FullBatch, Ledger, LedgerError
from equipoise.privacy.private import unwrap
from equipoise.statements.assumptions import Assumption
from equipoise.statements.recompute import differences
from equipoise.training.restarts import FinishedTraining


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("hardened", [False, True])
def test_no_file_holds_the_key_but_its_own_and_it_goes_at_the_end(tmp_path, hardened):
    run = training(sampling=FullBatch(60, 3), folder=tmp_path / "run", reproducible=False, hardened=hardened)
    run.take_step()
    run.save_checkpoint()
    key = run.ledger.secrets.key
    forms = [key, key.hex().encode(), base64.b64encode(key), base64.urlsafe_b64encode(key)]
    own = tmp_path / "run" / "private" / "key"
    assert own.read_bytes() == key
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    holding = {path for path, content in files(tmp_path).items() if any(form in content for form in forms)}
    assert holding == {own}
    run.run(progress=False)
    assert not own.exists()
    assert not any(form in content for content in files(tmp_path).values() for form in forms)
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement["private"] is True
    assert statement["noise"] == ("grid" if hardened else "floating_point")
    assert eq.verify_run(tmp_path / "run").consistent


@pytest.mark.parametrize("ends", ["early", "resumed"])
def test_no_file_holds_noise_after_the_end(tmp_path, ends):
    """Correlated noise is used again, so checkpoints hold it; what it hides was released."""
    method = eq.DPMF(bands=3, clip_norm=0.5, noise_multiplier=1.0)
    options = {"sampling": eq.FixedEpochs(12, 60, 6), "folder": tmp_path / "run", "reproducible": False}
    run = training(method=method, **options)
    for done in run:
        run.save_checkpoint()
        if done.step == 4:
            break
    noise = [
        (row["key"].encode(), unwrap(value).numpy().tobytes())
        for rows in run.ledger.history.values()
        for row in rows
        for value in row["noise"]["gradient"].values()
    ]
    assert len(noise) > 4

    def hold_noise():
        return any(part in content for content in files(tmp_path).values() for one in noise for part in one)

    assert hold_noise()
    if ends == "resumed":
        run.close()
        run = resumed(tmp_path / "run")
        list(run)
    run.finish(stop_fixed_beforehand=ends == "early")
    assert not hold_noise()
    assert not (tmp_path / "run" / "private" / "key").exists()
    again = {"loss": loss, "data": records(), "run": tmp_path / "run", "sampling": run.sampling}
    found = eq.PrivateTraining.start_or_resume(network(), run.optimizer, **again)
    assert isinstance(found, FinishedTraining)


ONE = bytes(range(32))


def test_the_keeper_of_a_secret_seed_repeats_a_run_and_nobody_else(tmp_path):
    ends = []
    for number, (content, seed) in enumerate([(ONE, 1), (ONE, 1), (ONE, 2), (ONE[::-1], 1)]):
        (tmp_path / "file").write_bytes(content)
        folder = tmp_path / str(number)
        options = {"folder": folder, "seed": seed, "reproducible": False, "secret_seed": tmp_path / "file"}
        run = training(network(), sampling=eq.Poisson(12, 60, 4), **options)
        if number == 1:  # a run that goes on needs the file no more
            saved(run)
            (tmp_path / "file").unlink()
            run = resumed(folder)
        result = run.run(progress=False)
        ends.append(parameters(run.model))
        assert result.statement.private
        assert Assumption.SECRET_SEED in result.statement.assumptions
        denied = json.loads(result.statement.to_json()) | {"secret_seed": False}
        assert differences(denied, result.statement) == ["secret_seed"]
        assert eq.verify_run(folder).consistent
    assert torch.equal(ends[0], ends[1])
    assert not any(torch.equal(ends[0], other) for other in ends[2:])
    options |= {"folder": None, "journal": tmp_path / "journal"}
    training(**options).run(progress=False)
    with pytest.raises(LedgerError, match="Give another seed"):
        training(**options)
    (tmp_path / "file").write_bytes(b"a" * 40)
    with pytest.raises(ValueError, match="less than 32 bytes"):
        training(**options)


@pytest.mark.parametrize("hardened", [False, True])
def test_the_seed_says_nothing_of_the_noise(hardened):
    """Every record in every draw: what differs between two runs of one seed is noise alone."""
    ends = []
    for reproducible, seed in ((False, 5), (False, 5), (True, 5), (True, 5), (True, 6)):
        options = {"seed": seed, "reproducible": reproducible, "hardened": hardened}
        made = training(sampling=FullBatch(60, 2), **options)
        made.run(progress=False)
        ends.append(parameters(made.model))
        assert ("NOT PRIVATE" in str(made.statement())) is reproducible
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    assert torch.equal(ends[2], ends[3])
    assert not torch.equal(ends[2], ends[4])


def test_hardened_noise_survives_a_resume(tmp_path):
    whole = training(sampling=FullBatch(60, 4), hardened=True)
    whole.run(progress=False)
    saved(training(sampling=FullBatch(60, 4), folder=tmp_path / "run", hardened=True))
    again = resumed(tmp_path / "run")
    again.run(progress=False)
    assert torch.equal(parameters(again.model), parameters(whole.model))


@pytest.mark.parametrize("asked", ["parameters", "method's state"])
def test_a_draw_depends_on_the_parameters_and_on_what_the_method_carries(monkeypatch, asked):
    """A folder put back from an older copy that goes on otherwise draws other records, with other secrets."""
    drawn, opened = [], Ledger.open
    monkeypatch.setattr(Ledger, "open", lambda *given: drawn.append(opened(*given)) or drawn[-1])

    def second_question(change):
        run = training(method=eq.DPSGD(clip_norm=ReleasedQuantile(0.5), noise_multiplier=1.0))
        run.take_step()
        if asked == "parameters":
            run.public_step(lambda: run.model[0].bias.data.add_(change))
        else:
            run._steps.state = {**run._steps.state, "threshold": 0.4 + change}
        run.take_step()
        return drawn[-1].parameters

    assert second_question(0.0) == second_question(0.0) != second_question(1e-6)

"""The bench on whole data sets: fair by construction, deaf to test records, and goes on where it stopped."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.trained_contenders import loss
from benchmarks.whole_data import cells
from benchmarks.whole_data.cells import AGAIN, PARTS, SEEDS, TRIALS, Bench
from benchmarks.whole_data.contenders import CONTENDERS
from benchmarks.whole_data.next_character import ALPHABET, LENGTH, read_shakespeare
from benchmarks.whole_data.problems import DESIGNS, PUBLIC, Design, Problem
from benchmarks.whole_data.tables import rows, table
from equipoise.data import DataSet, Records

COUNT, WIDTH, CLASSES = 400, 5, 3


class OutOfBounds(Records):
    """Test records that nobody may look at."""

    def __getitem__(self, index):
        raise AssertionError("the test records were looked at")


def data_set(test=Records):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(COUNT, WIDTH, generator=generator)
    fields = {"input": inputs, "label": inputs[:, :CLASSES].argmax(1), "number": torch.arange(COUNT)}
    train = Records(fields, num_classes=CLASSES)
    return DataSet("mushroom", train=train, test=test(fields), population=COUNT, num_classes=CLASSES)


@pytest.fixture
def problem():
    return Problem(data_set(), Design(None, steps=4, draws=4))


def test_a_choice_of_settings_never_looks_at_the_test_records():
    problem = Problem(data_set(OutOfBounds), Design(None, steps=4, draws=4))
    found = cells.measure(problem, "dp-sgd", 3.0, (1.0, 4.0), 100, "tuning")
    assert found["judges"] == round(0.2 * (COUNT - PUBLIC))
    with pytest.raises(AssertionError, match="looked at"):
        cells.measure(problem, "dp-sgd", 3.0, (1.0, 4.0), 100, "test")


@pytest.fixture
def calls(monkeypatch):
    """Runs that cost nothing, and what was asked for."""
    made = []

    def measure(problem, method, epsilon, point, seed, split):
        made.append((method, point, seed, split))
        # the test records would choose another point than the tuning does
        accuracy = point[1] if split == "test" else -abs(point[1] - 16)
        return {"accuracy": accuracy, "cpu_seconds": 1.0, "rate": point[1], "batch": 25, "judges": 100}

    monkeypatch.setattr(cells, "measure", measure)
    return made


def test_all_methods_have_the_same_number_of_runs_and_are_judged_where_tuning_ends(calls, tmp_path):
    bench = Bench(tmp_path / "runs.jsonl", lambda name: None)
    names = ("sgd", "dp-sgd", "auto-s", "dp-adam-bc")
    done = {("mushroom", name, 1.0): bench.cell("mushroom", name, 1.0) for name in names}
    counted = Counter((name, split) for name, _, _, split in calls)
    assert set(counted.values()) == {TRIALS + AGAIN, len(SEEDS)}
    assert {point[1] for _, point, _, split in calls if split == "test"} == {16.0}
    assert [row["median"] for row in rows(done)] == [16.0] * len(names)
    assert "| dp-sgd | 16.00 [16.00, 16.00]; 1, 16 | 1.0 |" in table(done)


@pytest.mark.parametrize("method", [*CONTENDERS, *PARTS])
def test_every_contender_trains(problem, method):
    found = cells.measure(problem, method, 3.0, (1.0, 4.0), 0, "test")
    assert 0 <= found["accuracy"] <= 100
    assert found["judges"] == COUNT


def test_a_training_without_clipping_has_the_noise_of_one_with_it():
    sampling = cells.eq.Poisson(75, 300, 4)
    made = cells._part("without clipping", 0.25, sampling, 3.0)
    needed = cells.calibrate_noise_multiplier(sampling, cells.eq.Budget(3.0, cells.DELTA))
    assert made.clip_norm * made.noise_multiplier == pytest.approx(0.25 * needed)


@pytest.fixture
def shakespeare(tmp_path):
    text = "".join(ALPHABET[(7 * i + i * i) % len(ALPHABET)] for i in range(LENGTH * 400))
    (tmp_path / "tinyshakespeare.txt").write_text(text, encoding="utf-8")
    return tmp_path, text


@pytest.mark.parametrize("method", ["dp-sgd", "joint-whitening, momentum"])
def test_a_language_model_trains(shakespeare, method):
    design = replace(DESIGNS["shakespeare"], steps=3, draws=4)
    problem = Problem(read_shakespeare("shakespeare", shakespeare[0]), design)
    records, _ = problem.parts("tuning")
    assert torch.equal(records["input"][:, 1:], records["label"][:, :-1])
    found = cells.measure(problem, method, 8.0, (1.0, 4.0), 0, "test")
    assert 0 < found["accuracy"] < 100
    assert found["judges"] == 40
    assert loss(problem.model(), records).shape == (len(records["input"]),)


@pytest.mark.parametrize("method", ["dp-sgd, adam", "joint-whitening, momentum"])
def test_a_recurrent_net_trains(method):
    tokens = torch.randint(0, 50, (COUNT, 30), generator=torch.Generator().manual_seed(0))
    rows = Records({"input": tokens, "label": tokens[:, 0] % 2}, num_classes=2)
    found = DataSet("sst2", rows, rows, population=COUNT, num_classes=2, vocabulary_size=50)
    problem = Problem(found, replace(DESIGNS["sst2-gru"], steps=3, draws=4))
    result = cells.measure(problem, method, 8.0, (1.0, 4.0), 0, "test")
    assert 0 < result["accuracy"] < 100
    first, second = (problem.model().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)

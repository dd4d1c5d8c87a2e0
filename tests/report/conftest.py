"""A run folder as a training leaves it, with invented numbers: only their shape matters here."""

import json
import math

import pytest


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "digits-sample"
    (folder / "private").mkdir(parents=True)
    (folder / "private" / "diagnostics.jsonl").write_text('{"step": 1, "loss": 123456.789}\n')
    sampling = {"scheme": "Poisson", "expected_batch_size": 718.5, "population": 1437, "steps": 80}
    gradient = {"name": "gradient", "mechanism": {"kind": "gaussian", "noise_multiplier": 7.25}}
    gradient |= {"max_bound": 0.5, "count": 80, "draw": "batch", "used": 80, "sampling": sampling}
    statement = {
        "guarantee": "proven",
        "epsilon": 2.9931,
        "delta": 1e-5,
        "accountant": "pld",
        "private": True,
    }
    statement |= {"private": True, "relation": "add_or_remove_one", "unit": "record", "recipe": "library"}
    statement |= {"releases": [gradient], "holes": [], "warnings": [], "other_runs": 0}
    statement["assumptions"] = ["the population, 1437", "the records were validated before training"]
    rows = []
    for step in range(1, 81):
        row = {"step": step, "epsilon": 2.9931 * math.sqrt(step / 80), "learning_rate": 2.0}
        row |= {"noise_norm": 0.42, "released_norm": math.hypot(0.42, 0.5 * math.exp(-step / 25))}
        if step % 5 == 0:
            row["evaluation.accuracy"] = 0.945 - 0.8 * math.exp(-step / 10)
        rows.append(row)
    experiment = {"data": "digits", "model": "mlp-tanh", "method": "dp-sgd", "epsilon": 3.0, "delta": 1e-5}
    experiment |= {"steps": 80, "test_records": 360, "reproducible": False}
    command = "equipoise train --data digits --epsilon 3 --delta 1e-05"
    config = {"format": 1, "command": command, "experiment": experiment}
    (folder / "statement.json").write_text(json.dumps(statement))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(config))
    return folder

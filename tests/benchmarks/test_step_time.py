"""The networks of the table of regimes are served as plain training serves them; comparisons."""

import argparse
import multiprocessing
import threading

import pytest
import torch

from benchmarks import step_time, tasks
from equipoise.gradients import per_sample_gradients

# Others are these with other sizes.
SMALL = ["mlp", "cnn", "resnet20", "attention", "lstm", "gru", "lstm-tagger", "gru-tagger", "lm-64", "gpt2"]


@pytest.mark.parametrize("name", SMALL)
def test_the_engine_serves_a_task_as_plain_training_does(name):
    if name.startswith("gpt2"):
        pytest.importorskip("transformers", reason="needs an optional package")
    torch.manual_seed(0)
    task = tasks.TASKS[name](batch_size=2)
    assert task.losses(task.model(task.inputs), task.labels).shape == (2,)
    batch = {"input": task.inputs, "label": task.labels}
    rows = per_sample_gradients(task.model, lambda m, b: task.losses(m(b["input"]), b["label"]), batch)
    sums = rows.weighted_sums(torch.ones(2))
    task.losses(task.model(task.inputs), task.labels).sum().backward()
    for key, parameter in task.model.named_parameters():
        scale = parameter.grad.abs().max().clamp(min=1e-3)
        assert (sums[key] - parameter.grad).abs().max() < 1e-3 * scale, key


class Here(step_time.Process):
    """A method in a thread of this process."""

    def __init__(self, *arguments):
        self.orders, end = multiprocessing.Pipe()
        threading.Thread(target=step_time.worker, args=(end, *arguments), daemon=True).start()

    def close(self):
        self.orders.close()


def of(measure, together=0):
    visits = {"rounds": 2, "seconds": 0.0, "steps": 1, "processor": True}
    return argparse.Namespace(measure=[measure], together=together, threads=1, gigabytes=0, **visits)


@pytest.mark.parametrize("together", [0, 1])
def test_a_method_that_fails_is_named_and_the_others_are_timed(monkeypatch, together):
    def refuses(task):
        raise ValueError("not this network")

    monkeypatch.setattr(step_time, "Process", Here)
    monkeypatch.setitem(step_time.BUILDERS, "peer", refuses)
    rows = step_time.measured("mlp-16", ["plain", "ours", "peer"], of("time", together=together))
    assert rows["plain"]["ratio"] == 1.0
    assert rows["ours"]["ratio"] > 1.0
    assert rows["peer"] == {"failed": "ValueError: not this network"}

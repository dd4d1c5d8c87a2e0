"""Objects that accelerate prepared, and its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import equipoise as eq

accelerate = pytest.importorskip("accelerate", reason="needs the extra hf")
sys.path.append(str(Path(__file__).parents[1] / "training"))
from small_problems import loss, network, records  # noqa: E402


def trained(prepare):
    model = network(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
    training = eq.PrivateTraining(
        model,
        optimizer,
        loss=loss,
        data=records(),
        sampling=eq.Poisson(expected_batch_size=12, population=60, steps=4),
        method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
        run=eq.Run(scheduler=scheduler, reproducible=True),
    )
    rates = [step.learning_rate for step in training]
    return rates, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_prepared_objects_are_taken():
    accelerator = accelerate.Accelerator(cpu=True)
    plain, prepared = trained(lambda *objects: objects), trained(accelerator.prepare)
    assert plain[0] == prepared[0] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert torch.equal(plain[1], prepared[1])
    waits = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(3, 3)
    with waits.accumulate(model), pytest.raises(RuntimeError, match="Nothing was drawn"):
        trained(waits.prepare)


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
import equipoise as eq
from small_problems import loss, network, records

accelerator = Accelerator(cpu=True)
model = network(seed=1)
training = eq.PrivateTraining(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, data=records(), device=accelerator.device,
    sampling=eq.Poisson(expected_batch_size=12, population=60, steps=3), run=sys.argv[1],
    method=eq.DPSGD(clip_norm=1.0, noise_multiplier=1.0),
)
training.run(progress=False)
sums = accelerator.gather(sum(p.detach().double().sum() for p in model.parameters())[None])
assert len(sums) == 2 and sums[0] == sums[1], sums
"""


@pytest.mark.slow
def test_two_processes_share_a_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[1] / "training"), *sys.path]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += [str(script), str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert eq.verify_run(tmp_path / "run").consistent

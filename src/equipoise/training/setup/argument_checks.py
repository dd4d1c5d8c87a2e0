"""Whether model, optimiser, scheduler and device of a training belong together; no record is looked at."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from equipoise import _validate
from equipoise._dtensor import is_dtensor
from equipoise.distributed.processes import Processes
from equipoise.gradients.engine_inputs import check_model, trainable_parameters
from equipoise.methods import METHODS, Method, find
from equipoise.methods.estimator import Estimator
from equipoise.privacy import PrivacyPlan
from equipoise.training.stages import Stage, check_covered


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's trainable parameters by name; a shared one appears once.

    Raises:
        TypeError: not a module, or one that cannot be watched (see `check_model`).
        ValueError: nothing to train, parameters still without shape or not real, or buffers that cannot be
            saved.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_validate.what_is(model)}; give a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"model parameter {name} has no shape yet: run the model once on a batch")
    check_model(model)
    found = trainable_parameters(model)
    if unreal := [name for name, p in found.items() if not p.is_floating_point()]:
        raise ValueError(f"model parameters {unreal} are not real numbers; freeze or convert them")
    saved = model.state_dict().keys()
    if sparse := [n for n, b in model.named_buffers() if n in saved and b.layout is not torch.strided]:
        raise ValueError(
            f"model buffers {sparse} are sparse, and a run's model file holds dense tensors only: register "
            "them with persistent=False, and build them again where the model is loaded"
        )
    return found


def check_trust(trust: Sequence[str], model: nn.Module) -> None:
    """Each name is that of a module inside the model.

    Raises:
        ValueError: one is not; a module of a near name is named.
    """
    names = [name for name, _ in model.named_modules() if name]
    for name in set(trust) - set(names):
        near = _validate.suggestion(name, names)
        near = near or (f" There is {names[-1]!r}, for instance." if names else " It has none.")
        raise ValueError(
            f"trust={name!r} is no module inside the model: give paths as in model.named_modules().{near}"
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], method: Method
) -> None:
    """The optimiser moves exactly the trainable parameters of the model, at a rate that it states.

    Raises:
        TypeError: not a torch optimiser, or one whose step would fail when its release is spent.
        ValueError: it misses trainable parameters, holds foreign ones, states no rate, or undoes what the
            method does.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {_validate.what_is(optimizer)}; give a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.5), and no GradScaler: bfloat16 needs none"
        )
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(
            f"optimizer is {_validate.what_is(optimizer)}, and a private step has one dense gradient (noise "
            "is in every entry): LBFGS needs several, SparseAdam a sparse one. Take SGD or Adam"
        )
    options = [*inspect.signature(type(optimizer).step).parameters.values()][1:]
    if needed := [
        p.name for p in options if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]:
        raise TypeError(
            f"optimizer is {_validate.what_is(optimizer)}, whose step needs {', '.join(needed)}, and a "
            "private step has one gradient, which is there when step() is called. Take SGD or Adam"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("optimizer has differentiable=True, and no gradient goes through a private step")
    if method.is_whole_step and not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"optimizer is {_validate.what_is(optimizer)}, whose steps have a length of their own, and "
            f"{method.name} sets it: give torch.optim.SGD(model.parameters(), lr=1.0)"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError("optimizer has lr=None, and the rate of each step is written down: give it a number")
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if held.pop(id(p), None) is None]
    if missing:
        raise ValueError(
            f"optimizer does not hold the trainable parameters {missing}: build it from the model that you "
            "give (after moving it to its device), or freeze them with requires_grad_(False)"
        )
    if foreign := [p for p in held.values() if p.requires_grad]:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameters that are not the model's: build it from "
            "model.parameters(). To train those of a loss, put it into the model: nn.ModuleDict({'model': "
            "..., 'loss': ...})"
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The scheduler follows the step alone, steers this optimiser and lasts for all steps.

    Raises:
        TypeError: a scheduler that wants a metric, or no scheduler.
        ValueError: it steers another optimiser, or ends before the plan.
    """
    if scheduler is None:
        return
    parts = [scheduler]
    for part in parts:  # PyTorch's chains and sequences keep theirs there
        parts += getattr(part, "_schedulers", ())
    if any(isinstance(part, ReduceLROnPlateau) for part in parts):
        raise TypeError(
            "scheduler is or holds a ReduceLROnPlateau, which follows a metric: take a schedule of the step, "
            "or lower the rate in the loop by a public metric"
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler is {_validate.what_is(scheduler)}; give a scheduler of this optimiser, such as "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("scheduler steers another optimiser than the one given: build it from that one")
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < steps:  # it refuses to go further
        raise ValueError(
            f"scheduler ends after {scheduler.total_steps} steps, and {steps} are planned: give it {steps}"
        )


def check_stages(
    stages: Sequence[Stage],
    method: Method,
    plan: PrivacyPlan,
    steps: int,
    parameters: dict[str, nn.Parameter],
) -> None:
    """Refuse stages of a training that cannot have them.

    Raises:
        ValueError, NotImplementedError: saying why, and what can.
    """
    for stage in stages:
        _validate.instance(Stage, "[Stage(0, 'head.*'), Stage(20, 'head.*', 'body.*')]", stages=stage)
    if not stages:
        return
    check_covered(stages, parameters)
    remedy = "take dp-sgd, or a run for each stage with one journal for all, Run(journal=...)"
    if stages[-1].begins >= steps:
        raise ValueError(f"stages: the last begins after {stages[-1].begins} steps, and {steps} are planned")
    if any(map(is_dtensor, parameters.values())):
        raise NotImplementedError("stages are of models that every process holds whole: take a run for each")
    if not isinstance(method, Estimator) or {release.draw for release in plan.releases} != {"batch"}:
        raise ValueError(
            f"stages: method={method.name!r} remembers parameters of earlier steps, which are other ones "
            f"now: {remedy}"
        )
    if any(release.mechanism.memory for release in plan.releases):
        raise ValueError(
            f"stages: the noise of method={method.name!r} goes on from step to step, over one set of "
            f"parameters: {remedy}"
        )


def check_sharding(
    parameters: dict[str, nn.Parameter], method: Method, hardened: bool, processes: Processes
) -> None:
    """All processes hold parts of the model, and the method asks for nothing that needs it whole.

    Raises:
        NotImplementedError: naming what models of which processes hold parts do not take, and the remedy.
    """
    parts = {name: p for name, p in parameters.items() if is_dtensor(p)}
    how, refused = "tensor parallel" if processes.same_records else "fully_shard", ""
    if parts and how not in method.split_models:
        taken = [kind.__name__ for kind in map(find, METHODS) if how in kind.split_models]
        refused = f"method={method.name!r} was not made for them: take {' or '.join(taken)}"
    elif parts and hardened:
        refused = "hardened=True draws its noise number by number: leave it out"
    for name, parameter in parts.items():
        if parameter.device_mesh.size() != processes.count:
            refused = f"not all {processes.count} processes hold a part of {name}: let them"
        # Of a model whose processes share the draw, whole sums are cut into rows.
        elif not processes.same_records and any(
            not (one.is_replicate() or one.is_shard(0)) for one in parameter.placements
        ):
            refused = f"{name} lies as {parameter.placements}: shard it along its first axis"
    if refused:
        raise NotImplementedError(
            f"processes hold parts of the model, and {refused}, or give the model as it was before "
            "fully_shard or parallelize_module. Nothing was spent"
        )


def existing_device(device: str | torch.device) -> torch.device:
    """The device that is named.

    Raises:
        ValueError: there is no such device, or not on this machine.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:  # as each backend has it
        raise ValueError(
            f"{_validate.given('device', device)} is no device that this machine has: give 'cpu', or "
            "'cuda' where there is a GPU, or leave it out"
        ) from error


def move(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str | torch.device | None
) -> torch.device:
    """Move the model, and what the optimiser remembers, to the device; the place of the parameters when None.

    Raises:
        ValueError: the parameters lie on several devices, or the device does not exist.
    """
    places = {p.device for p in model.parameters()}
    if device is None:
        if len(places) > 1:
            raise ValueError(
                f"the model's parameters lie on several devices, {sorted(map(str, places))}; give device=..."
            )
        return next(iter(places))
    target = existing_device(device)
    model.to(target)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(target)
    return next(model.parameters()).device

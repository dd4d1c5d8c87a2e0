"""Whether model, optimiser, scheduler and device of a training belong together; no record is looked at."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from equipoise import _validate
from equipoise._dtensor import is_dtensor
from equipoise._foreign_errors import cause_of, where_raised
from equipoise.gradients.engine_inputs import check_model, trainable_parameters
from equipoise.methods import METHODS, Method, find
from equipoise.training.distributed import Processes
from equipoise.training.setup.training_settings import TrainingSettings

__all__ = [
    "check_optimizer",
    "check_scheduler",
    "check_sharding",
    "check_step",
    "check_trust",
    "existing_device",
    "move",
    "trainable",
]


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
            raise ValueError(
                f"model parameter {name} has no shape yet (a lazy module): run the model once on a batch "
                "before training"
            )
    check_model(model)
    found = trainable_parameters(model)
    if unreal := [name for name, p in found.items() if not p.is_floating_point()]:
        raise ValueError(f"model parameters {unreal} are not real numbers; freeze or convert them")
    saved = model.state_dict().keys()
    if sparse := [n for n, b in model.named_buffers() if n in saved and b.layout is not torch.strided]:
        raise ValueError(
            f"model buffers {sparse} are sparse, and the file of a run's model holds dense tensors only: "
            "register them with persistent=False, and build them again where the model is loaded"
        )
    return found


def check_trust(trust: Sequence[str], model: nn.Module) -> None:
    """Each name is that of a module inside the model.

    Raises:
        ValueError: one is not; modules of near names are listed.
    """
    names = [name for name, _ in model.named_modules() if name]
    for name in set(trust) - set(names):
        near = get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
        raise ValueError(
            f"trust={name!r} is no module inside the model; near it are {', '.join(map(repr, near))}. "
            "Give paths as model.named_modules() has them"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """The optimiser moves exactly the trainable parameters of the model, at a rate that it states.

    Raises:
        TypeError: not a torch optimiser.
        ValueError: it misses trainable parameters, holds foreign ones, or states no rate.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {_validate.what_is(optimizer)}; give a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.5), and no GradScaler: bfloat16 needs none"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError("optimizer has lr=None, and the rate of each step is written down: give it a number")
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if held.pop(id(p), None) is None]
    if missing:
        raise ValueError(
            f"optimizer does not hold the trainable parameters {missing}: they would be noised and never "
            "moved. Build it from the model that you give (moving a model to another device can replace its "
            "parameters), or freeze them with requires_grad_(False)."
        )
    if foreign := [p for p in held.values() if p.requires_grad]:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameters that are not parameters of model: no private "
            "gradient can be computed for them. Build the optimiser from model.parameters(). To train those "
            "of a loss, put it into the model: nn.ModuleDict({'model': ..., 'loss': ...}) or add_module."
        )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Let a copy of the optimiser take a step on tiny parameters: one that fails later has spent its release.

    Raises:
        TypeError: an optimiser of torch fails, or gives what is not finite. Of another one, which may not
            bear to be copied, this is a warning.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tiny = {id(p): torch.ones([min(2, n) for n in p.shape], dtype=p.dtype, device=p.device) for p in params}
    # The copy has no hooks, which may write to the model, and begins anew. What a scheduler puts in the place
    # of `step` is bound to the original.
    fields = {n: v for n, v in vars(optimizer).items() if n not in ("step", "state") and "_hooks" not in n}
    try:
        copied = type(optimizer).__new__(type(optimizer))
        copied.__setstate__(copy.deepcopy(fields, dict(tiny)) | {"state": defaultdict(dict)})
        for parameter, one in zip(params, tiny.values(), strict=True):
            one.grad = torch.ones_like(one) if parameter.requires_grad else None
        copied.step()
        if not all(bool(one.isfinite().all()) for one in tiny.values()):
            raise FloatingPointError("parameters are not finite after a step")
    except Exception as error:
        fails = (
            f"optimizer {type(optimizer).__name__} fails in a step with a dense gradient, as private steps "
            f"have it (noise is in every entry): {where_raised(error)}"
        )
        if not type(optimizer).step.__module__.startswith("torch."):
            warnings.warn(
                f"{fails}, tried on a copy. If it is so in a step, a release is spent", stacklevel=2
            )
            return
        raise TypeError(
            f"{fails}. Take torch.optim.SGD or Adam, for look-up tables too, or another one that needs no "
            "closure, with finite lr, weight_decay and momentum. Nothing was spent."
        ) from cause_of(error)


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """The scheduler follows the step alone and steers this optimiser.

    Raises:
        TypeError: a scheduler that wants a metric, or no scheduler.
        ValueError: it steers another optimiser.
    """
    if scheduler is None:
        return
    parts = [scheduler]
    for part in parts:  # PyTorch's chains and sequences keep theirs there
        parts += getattr(part, "_schedulers", ())
    if any(isinstance(part, ReduceLROnPlateau) for part in parts):
        raise TypeError(
            "scheduler is or holds a ReduceLROnPlateau, which follows a metric; a metric of private data "
            "would leak through the learning rate. Use a schedule of the step, or lower the rate yourself "
            "from a public metric in the loop."
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler is {_validate.what_is(scheduler)}; give a scheduler of this optimiser, such as "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "scheduler steers another optimiser than the one given: build it from the same optimiser"
        )


def check_sharding(
    parameters: dict[str, nn.Parameter], method: Method, settings: TrainingSettings, processes: Processes
) -> None:
    """All processes hold parts of the model, and the method asks for nothing that needs it whole.

    Raises:
        NotImplementedError: naming what models of which processes hold parts do not take yet, and the remedy.
        ValueError: the parts are those of other processes than those that train.
    """
    parts = {name: p for name, p in parameters.items() if is_dtensor(p)}
    if not parts:
        return
    whole = "give the model as it was before fully_shard or parallelize_module"
    how = "tensor parallel" if processes.same_records else "fully_shard"
    if how not in method.split_models:
        taken = [kind.__name__ for kind in map(find, METHODS) if how in kind.split_models]
        raise NotImplementedError(
            f"method={method.name!r} was not made for models of which processes hold parts: take "
            f"{' or '.join(taken)}, or {whole}. Nothing was spent"
        )
    if settings.hardened:
        raise NotImplementedError(
            "hardened=True draws its noise number by number, and no process could draw that of its part: "
            f"leave it out, or {whole}. Nothing was spent"
        )
    for name, parameter in parts.items():
        size = parameter.device_mesh.size()
        if size != processes.count:
            raise ValueError(
                f"{size} processes hold the parameter {name}, and {processes.count} train: let all of them "
                "hold a part of it. Nothing was spent"
            )
        # Of a model whose processes share the draw, whole sums are cut into rows.
        if not processes.same_records and not all(
            one.is_replicate() or one.is_shard(0) for one in parameter.placements
        ):
            raise NotImplementedError(
                f"the parameter {name} of shape {tuple(parameter.shape)} lies as {parameter.placements}: "
                "shard it along its first axis, as fully_shard does by itself. Nothing was spent"
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

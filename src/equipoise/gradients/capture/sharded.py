"""Models of whose parameters each process holds a part, a DTensor.

*Fully sharded* (`torch.distributed.fsdp.fully_shard`). Just before a module runs, FSDP puts the whole
parameter in its place, and afterwards takes it away again. So what operations see is never the parameter that
`named_parameters` gives. While a model runs here, temporary hooks on the sharded modules, behind FSDP's own,
tell whoever listens which tensor stands for which name. What FSDP itself computes in its hooks is not part
of the model: watchers look away meanwhile.

*Tensor parallel* (`torch.distributed.tensor.parallel.parallelize_module`). Operations see DTensors: each
process computes a part of them, and all run the same records (`tensor_parallel_mesh`).

Other values for the parameters are written into the parts, for one evaluation and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from equipoise._dtensor import is_a_copy, is_cut_once, is_dtensor, local_part, with_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Whoever wants to know the tensor that operations see in the place of a named parameter.
_LISTENERS: list[Callable[[str, Tensor], None]] = []

#: Models with sharded parameters, as far as `note_sharding` looked at them.
SHARDED: WeakSet[nn.Module] = WeakSet()

#: How many of FSDP's own hooks are running, in a list that others look into: watchers pass over what they do.
FSDP_AT_WORK = [0]


def note_sharding(model: nn.Module) -> tuple[list[str], str]:
    """Note whether processes hold parts of the model.

    Returns:
        Names of parameters that lie in a way that nothing here knows, and what is unknown about them.
    """
    SHARDED.discard(model)
    resharded(model)  # what ran before may have left it whole
    parts = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    if not parts:
        return [], ""
    SHARDED.add(model)
    groups = fsdp_groups(model)
    held = [one for group in groups for one in group.fsdp_params]
    # Not those that are cut in another way as well.
    managed = {id(one.sharded_param) for one in held if not getattr(one, "is_dtensor", False)}
    left = {name: p for name, p in parts.items() if id(p) not in managed}
    if groups:
        return [*left], "parallelize_module and fully_shard both hold parts of the model"
    meshes = {p.device_mesh for p in left.values()}
    if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        return [*left], "they lie on a mesh of several axes, or on several meshes"
    known = {name for name, p in left.items() if is_a_copy(p) or is_cut_once(p)}
    return [name for name in left if name not in known], "they are neither cut along one axis nor copied"


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """The processes that compute a part of every operation each; None if there are none."""
    if model not in SHARDED or fsdp_groups(model):
        return None
    return next(p.device_mesh for p in model.parameters() if is_dtensor(p))


def found_by_any(model: nn.Module, found: dict[str, str]) -> dict[str, str]:
    """What any process that holds a part of the model found: all of them have to decide alike."""
    if model not in SHARDED:
        return found
    mesh = next(p.device_mesh for p in model.parameters() if is_dtensor(p))
    for axis in range(mesh.ndim):
        of_all: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(of_all, found, group=mesh.get_group(axis))
        found = {name: reason for part in of_all for name, reason in part.items()}
    return found


@contextmanager
def leaves_told(listener: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Inside, `listener(name, tensor)` hears which tensor operations see in the place of a parameter.

    Of a model that is not sharded it hears nothing: operations see the parameters.
    """
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def hooked_by_fsdp(args: tuple) -> bool:
    """Whether `register_hook` gets a hook of FSDP's own, which gathers parameters and changes no gradient."""
    owner = getattr(args[1], "__self__", None) if len(args) > 1 else None
    return type(owner).__module__.startswith("torch.distributed.fsdp")


@contextmanager
def parameters_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, a sharded model runs as FSDP runs it, and listeners hear of its leaves.

    Around a forward alone, inside `other_values`.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    taken: dict[int, list[tuple[nn.Module, str, str]]] = {}

    def note(module: nn.Module, owner: nn.Module | None) -> None:
        owner = module if _is_fsdp(module) else owner
        if owner is not None:
            for key, parameter in module._parameters.items():
                if parameter is not None and is_dtensor(parameter):
                    taken.setdefault(id(owner), []).append((module, key, names[id(parameter)]))
        for child in module.children():
            note(child, owner)

    note(model, None)

    def tell(module: nn.Module) -> None:
        for place, key, name in taken.get(id(module), ()):
            tensor = place._parameters[key]
            if tensor is not None and not is_dtensor(tensor):
                for listener in _LISTENERS:
                    listener(name, tensor)

    def look_away(*_: Any) -> None:
        FSDP_AT_WORK[0] += 1

    def look_again(*_: Any) -> None:
        FSDP_AT_WORK[0] -= 1

    def begin(module: nn.Module, _: Any) -> None:
        look_again()
        tell(module)

    gathered = {name for places in taken.values() for *_, name in places}
    for name, parameter in model.named_parameters():
        if name not in gathered:  # operations see it as it is, whatever values it has been given
            for listener in _LISTENERS:
                listener(name, parameter)

    before, handles = FSDP_AT_WORK[0], []
    for module in model.modules():
        if _is_fsdp(module):
            handles += [
                module.register_forward_pre_hook(look_away, prepend=True),
                module.register_forward_pre_hook(begin),
                module.register_forward_hook(look_away, prepend=True),
                module.register_forward_hook(look_again),
            ]
    try:
        yield
    finally:
        FSDP_AT_WORK[0] = before
        for handle in handles:
            handle.remove()


def resharded(model: nn.Module) -> None:
    """See that every sharded parameter is a part: without a backward FSDP leaves some whole."""
    for module in model.modules():
        if _is_fsdp(module) and module._get_fsdp_state()._is_root:  # type: ignore[operator]
            module._get_fsdp_state()._reset_iter_state()  # type: ignore[operator]


def begin_sharded(model: nn.Module) -> bool:
    """Let FSDP prepare itself now, which it would do in its first forward; False if nothing is sharded."""
    if model not in SHARDED:
        return False
    for module in model.modules():
        if _is_fsdp(module):
            module._get_fsdp_state()._lazy_init()  # type: ignore[operator]
    return True


def fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP's groups of parameters that are gathered together, each once, in the order of the modules."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if _is_fsdp(module):
            groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
            found |= {id(group): group for group in groups}
    return list(found.values())


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "_get_fsdp_state")


@contextmanager
def other_values(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a sharded model has other values for some parameters; its own come back, unmarked as writes.

    Afterwards every parameter is a part again, also where a forward failed or had no backward.

    Args:
        model: nothing in it has been gathered.
        values: by name, DTensors in the placements of the parameters, or whole tensors.
    """
    resharded(model)
    own = dict(model.named_parameters())
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name, value in values.items():
            # `.data` shares memory without the count of writes: this is no write by the model.
            place = local_part(own[name]).data
            kept.append((place, place.clone()))
            part = value if is_dtensor(value) else with_values(value.detach(), own[name])
            place.copy_(local_part(part).detach())
        yield
    finally:
        resharded(model)
        for place, before in kept:
            place.copy_(before)

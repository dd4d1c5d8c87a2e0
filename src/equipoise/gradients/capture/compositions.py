"""Functions that a capture sees through, since what they call has rules.

Attention's Python function is run as it is, with its inner calls shown. Recurrent layers and cells are
kernels that show nothing; here they are written as the products that they consist of,

    u_t = W_ih x_t + b_ih  (all t at once),    v_t = W_hh h_{t-1} + b_hh,    h_t = cell(u_t, v_t, h_{t-1}).

A layer's values differ from its kernel's by no more than rounding; on a processor, PyTorch's kernels take the
same steps. Packed sequences, and layers whose weights are frozen, stay kernels.

Scaled dot products whose mask has a gradient, such as T5's bias by relative position, are the products, the
softmax and the dropout of PyTorch's own reference: the kernel would draw its dropout again for every row.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

RecurrentState = tuple[Tensor, ...]
#: From u_t, v_t and the state before to the state after, whose first part is h_t.
Cell = Callable[[Tensor, Tensor, RecurrentState], RecurrentState]


def composition(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable | None:
    """What to call in place of ``func`` to see what it consists of; None for what is called as it is."""
    found = COMPOSITIONS.get(func)
    if found is None or func is F.multi_head_attention_forward:
        return found
    if func is F.scaled_dot_product_attention:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        return found if mask is not None and mask.requires_grad else None
    if kwargs or args[0].ndim != (2 if func in _CELLS else 3):
        return None
    weights = args[2:] if func in _CELLS else args[2]
    # The weights of packed sequences come one place later.
    if isinstance(weights, Tensor) or not any(w is not None and w.requires_grad for w in weights):
        return None
    return found


def opened(func: Callable) -> Callable:
    """``func`` with its own dispatch to modes switched off, so that the functions inside it are seen."""
    assert isinstance(func, types.FunctionType)
    scope = {**func.__globals__}
    # What it asks before it hands itself to a mode as a whole.
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = lambda *_: False
    found = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    found.__kwdefaults__ = func.__kwdefaults__
    return found


def _lstm(u: Tensor, v: Tensor, state: RecurrentState) -> RecurrentState:
    i, f, g, o = (u + v).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(u: Tensor, v: Tensor, state: RecurrentState) -> RecurrentState:
    (r, z, n), (r_v, z_v, n_v) = u.chunk(3, -1), v.chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + r_v) * n_v)
    return (n + torch.sigmoid(z + z_v) * (state[0] - n),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda u, v, state: (activation(u + v),)


def _cell(cell: Cell) -> Callable:
    """As ``torch.lstm_cell`` and its kin."""

    def run(
        x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        after = cell(F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return after[0] if isinstance(hx, Tensor) else after

    return run


def _layers(cell: Cell) -> Callable:
    """As ``torch.lstm`` and its kin, for sequences that are not packed."""

    def run(
        x: Tensor,
        hx: Any,
        weights: Sequence[Tensor],
        biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        before = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        directions, time = 2 if bidirectional else 1, 1 if batch_first else 0
        each = len(weights) // (num_layers * directions)
        after: list[RecurrentState] = []
        for layer in range(num_layers):
            if layer and dropout and train:
                x = F.dropout(x, dropout, training=True)
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                own = weights[number * each : (number + 1) * each]
                state = tuple(part[number] for part in before)
                output, state = _direction(cell, x, state, own, biases, time, backwards=direction == 1)
                outputs.append(output)
                after.append(state)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        return (x, *(torch.stack(parts) for parts in zip(*after, strict=True)))

    return run


def _direction(
    cell: Cell,
    x: Tensor,
    state: RecurrentState,
    weights: Sequence[Tensor],
    biases: bool,
    time: int,
    backwards: bool,
) -> tuple[Tensor, RecurrentState]:
    """One direction of one layer; ``weights`` are W_ih, W_hh, the biases if any, and an LSTM's projection."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if biases else (None, None)
    u_all = F.linear(x, w_ih, b_ih)
    if b_hh is not None and cell is not _gru:  # where the cell adds u and v, once is cheaper than at each t
        u_all, b_hh = u_all + b_hh, None
    steps = u_all.unbind(time)
    outputs = []
    for u in reversed(steps) if backwards else steps:
        state = cell(u, F.linear(state[0], w_hh, b_hh), state)
        if rest:
            state = (F.linear(state[0], rest[0]), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, time), state


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As ``F.scaled_dot_product_attention`` with a mask that is added, and so without a causal one."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key * root).transpose(-2, -1) + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


#: Logits of fewer numbers (4 MB of float32) are taken at once, others in so many parts. Choices: smaller
#: logits or more parts save less memory than their calls cost time; fewer parts hold a larger part beside the
#: two tensors.
SMALL_LOGITS, LOGIT_PARTS = 1 << 20, 4
#: On others a softmax over classes that lie apart takes as long for a few records as for all.
IN_PARTS_ON = {"cpu"}


def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.cross_entropy``, in the way that suits the device where there are many logits and no mean is taken.

    On a GPU the classes come to lie side by side first, as most models have made them: PyTorch's softmax is
    many times faster there, and its values are the same within rounding.

    On the CPU a few places of all records, such as tokens, come after the others. At once the backward holds
    three tensors of their size: the logarithms of the softmax, their gradient and that of the logits. In
    parts it holds two. The values are the same bits. Parts of the records would end the proof, which knows
    no place of a record, so that one class for each record is taken at once. So are shares of classes and
    smoothed labels: their loss is a sum over the classes, which threads cut by the size of a part.
    """
    suited = (
        {type(input), type(target)} <= {Tensor, FakeTensor}
        and kwargs.get("reduction") == "none"
        and not args
        and kwargs.get("size_average") is kwargs.get("reduce") is None
        and input.ndim >= (3 if input.device.type in IN_PARTS_ON else 2)
        and len(target) == len(input)
        and input.numel() >= SMALL_LOGITS
        and input.requires_grad
        and not target.is_floating_point()
        and not kwargs.get("label_smoothing")
    )
    if not suited:
        return F.cross_entropy(input, target, *args, **kwargs)
    if input.device.type not in IN_PARTS_ON:
        rows = input.movedim(1, -1).flatten(0, -2)
        return F.cross_entropy(rows, target.flatten(), **kwargs).view(target.shape)
    places, target = input.flatten(2), target.flatten(1)
    each = 16 * math.ceil(places.shape[2] / LOGIT_PARTS / 16)  # whole vectors of AVX-512 have the same bits
    parts = zip(torch.split(places, each, 2), torch.split(target, each, 1), strict=True)
    found = torch.cat([F.cross_entropy(*part, **kwargs) for part in parts], 1)
    return found.view(input.shape[:1] + input.shape[2:])


_CELLS: dict[Callable, Callable] = {
    torch.lstm_cell: _cell(_lstm),
    torch.gru_cell: _cell(_gru),
    torch.rnn_tanh_cell: _cell(_rnn(torch.tanh)),
    torch.rnn_relu_cell: _cell(_rnn(torch.relu)),
}


#: The functions that may be seen through, and what is called in their place.
COMPOSITIONS: dict[Callable, Callable] = {
    **_CELLS,
    F.multi_head_attention_forward: opened(F.multi_head_attention_forward),
    F.scaled_dot_product_attention: _attention,
    torch.lstm: _layers(_lstm),
    torch.gru: _layers(_gru),
    torch.rnn_tanh: _layers(_rnn(torch.tanh)),
    torch.rnn_relu: _layers(_rnn(torch.relu)),
}

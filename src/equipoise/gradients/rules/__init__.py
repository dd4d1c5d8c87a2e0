"""Rules: from an operation, its inputs and its output gradient to the factors of the parameters it used.

    rule(operation) -> finish or None;    finish(b) -> [(tracked tensor, factor), ...]

A rule looks at the operation when it has just run, keeps the inputs it will need (detached, not copied) and
returns the function that turns the gradient ``b`` of the operation's output into factors. None means "not in
this form".
Rules are for operations, not for modules: a layer is served because of what it computes. An operation without
a rule of its own, whose output follows the records, is served by ``local``: the vector-Jacobian product of
that operation alone, vectorised over records.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from equipoise.gradients.rules.convolutions import conv, conv_transpose
from equipoise.gradients.rules.elementwise import add, expand, mul, sub
from equipoise.gradients.rules.local import local
from equipoise.gradients.rules.lookups import embedding, embedding_bag, get_item
from equipoise.gradients.rules.norms import group_norm, layer_norm
from equipoise.gradients.rules.operation import Finish, Operation, Rule
from equipoise.gradients.rules.products import addmm, einsum, linear, matmul

__all__ = ["MATRIX_RULES", "RULES", "Finish", "Operation", "Rule", "local", "rule_for"]

_T = torch.Tensor

RULES: dict[Callable, Rule] = {
    func: rule
    for rule, functions in {
        linear: (F.linear,),
        addmm: (torch.addmm, _T.addmm),
        matmul: (torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__),
        einsum: (torch.einsum,),
        conv: (F.conv1d, F.conv2d, F.conv3d),
        conv_transpose: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        embedding: (F.embedding,),
        embedding_bag: (F.embedding_bag,),
        get_item: (_T.__getitem__,),
        layer_norm: (F.layer_norm,),
        group_norm: (F.group_norm,),
        add: (torch.add, _T.add, _T.add_, _T.__add__, _T.__radd__, _T.__iadd__),
        sub: (torch.sub, _T.sub, _T.sub_, _T.__sub__, _T.__isub__),
        mul: (torch.mul, _T.mul, _T.__mul__, _T.__rmul__, torch.multiply, _T.multiply),
        expand: (
            _T.expand,
            _T.expand_as,
            _T.repeat,
            torch.broadcast_to,
            _T.broadcast_to,
            torch.tile,
            _T.tile,
        ),
    }.items()
    for func in functions
}


#: Rules whose factors, like the backward of their operations, want the output gradient in one piece.
MATRIX_RULES = frozenset({linear, addmm, matmul})


def rule_for(func: Callable) -> tuple[Rule, ...]:
    """The rules to try for a function, the special one first."""
    special = RULES.get(func)
    return (local,) if special is None else (special, local)

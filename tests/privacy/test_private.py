"""A private value computes, and leaves by no way but the ledger."""

import copy
import io
import logging
import math
import pickle

import numpy as np
import pytest
import torch
from privacy_rows import DenseRows, rows

from equipoise.gradients import DenseGradients
from equipoise.methods.subspaces import held
from equipoise.privacy import Draw, Private, PrivateError, PrivateRows
from equipoise.privacy.private import add_exact, join, unwrap

SECRET = torch.tensor([3.0, 1.0, 2.0])


@pytest.fixture
def p() -> Private:
    return Private(SECRET.clone(), Draw("batch", 0))


def _if(p):
    if p[0] > 1:
        pass


WAYS = {
    "float": lambda p: float(p[0]),
    "int": lambda p: int(p[0]),
    "bool": lambda p: bool(p[0]),
    "complex": lambda p: complex(p[0]),
    "if": _if,
    "and": lambda p: p[0] > 1 and 1,
    "item": lambda p: p[0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "numpy force": lambda p: p.numpy(force=True),
    "np.asarray": lambda p: np.asarray(p),
    "np.array": lambda p: np.array(p),
    "np.float64": lambda p: np.float64(p[0]),
    "np of list": lambda p: np.array([p[0], p[1]], dtype=float),
    "str": lambda p: str(p),
    "print": lambda p: print(p),
    "format": lambda p: f"{p}",
    "format spec": lambda p: f"{p[0]:.2f}",
    "percent": lambda p: "%s" % p,  # noqa: UP031
    "percent f": lambda p: "%f" % p[0],  # noqa: UP031
    "index": lambda p: [1, 2, 3, 4][p.long()[0]],
    "range": lambda p: range(p.long()[0]),
    "slice": lambda p: torch.zeros(5)[: p.long()[0]],
    "in": lambda p: 3.0 in p,
    "max builtin": lambda p: max(p),
    "sorted": lambda p: sorted(p),
    "math": lambda p: math.sqrt(p[0]),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "save in a dict": lambda p: torch.save({"a": p}, io.BytesIO()),
    "__dlpack__": lambda p: p.__dlpack__(),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "np.from_dlpack": lambda p: np.from_dlpack(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.storage(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "equal": lambda p: torch.equal(p, SECRET),
    "allclose": lambda p: torch.allclose(p, SECRET),
    "is_nonzero": lambda p: torch.is_nonzero(p[0]),
    "nonzero": lambda p: torch.nonzero(p > 1),
    "where of one argument": lambda p: torch.where(p > 1),
    "masked_select": lambda p: torch.masked_select(torch.arange(3), p > 1),
    "unique": lambda p: torch.unique(p),
    "mask index": lambda p: torch.arange(3)[p > 1],
    "own mask index": lambda p: p[p > 1],
    "bincount": lambda p: torch.bincount(p.long()),
    "repeat_interleave": lambda p: torch.arange(3).repeat_interleave(p.long()),
    "add_ into public": lambda p: torch.zeros(3).add_(p),
    "copy_ into public": lambda p: torch.zeros(3).copy_(p),
    "setitem into public": lambda p: torch.zeros(3).__setitem__(0, p[0]),
    "+= into public": lambda p: torch.zeros(3).__iadd__(p),
    "out=": lambda p: torch.add(p, 1, out=torch.zeros(3)),
    "index_add_": lambda p: torch.zeros(3).index_add_(0, torch.arange(3), p),
    "scatter_": lambda p: torch.zeros(4).scatter_(0, p.long(), 1.0),
    "fill_": lambda p: torch.zeros(3).fill_(p[0]),
    "tolist of sum": lambda p: p.sum().tolist(),
    "alpha": lambda p: torch.add(torch.zeros(3), torch.ones(3), alpha=p[0]),
    "clamp by float": lambda p: torch.ones(3).clamp(max=float(p[0])),
    "torch.full": lambda p: torch.full((2,), p[0]),
    "share_memory_": lambda p: p.share_memory_(),
    "array of rows": lambda p: memoryview(p),
    "bytes": lambda p: bytes(p.to(torch.uint8)),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_value_does_not_leave(way, p):
    with pytest.raises((PrivateError, TypeError)) as error:
        WAYS[way](p)
    assert "3.0" not in str(error.value)


def test_error_says_how_to_release(p):
    with pytest.raises(PrivateError, match=r"ledger\.release"):
        float(p[0])


STAYS = {
    "torch.tensor": lambda p: torch.tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "clone": lambda p: p.clone(),
    "cpu": lambda p: p.cpu(),
    "to": lambda p: p.to(torch.float64),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p) if hasattr(p, "__copy__") else p,
    "stack": lambda p: torch.stack([p[0], torch.tensor(1.0)]),
    "cat": lambda p: torch.cat([torch.zeros(1), p]),
    "public + private": lambda p: torch.ones(3) + p,
    "number - private": lambda p: 1 - p,
    "where": lambda p: torch.where(p > 1, 1.0, 0.0),
    "public where": lambda p: torch.where(p > 1, torch.ones(3), torch.zeros(3)),
    "matmul": lambda p: torch.ones(2, 3) @ p,
    "norm": lambda p: p.norm(),
    "topk": lambda p: torch.topk(p, 2).indices,
    "sort": lambda p: p.sort().values,
    "gather": lambda p: torch.arange(5.0)[p.long()],
    "einsum": lambda p: torch.einsum("i,i->", p, SECRET),
    "isfinite any": lambda p: torch.isfinite(p).any(),
    "iteration": lambda p: next(iter(p)),
    "in place": lambda p: p.clone().add_(1),
    "new_tensor": lambda p: p.new_zeros(3) + p,
    "parameter": lambda p: torch.nn.Parameter(p).data,
    "median": lambda p: p.median(),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("way", STAYS, ids=str)
def test_results_stay_private(way, p):
    assert isinstance(STAYS[way](p), Private)


def test_arithmetic_is_right(p):
    raw = SECRET
    assert torch.equal(unwrap((2 * p + 1).clamp(max=5) / p), (2 * raw + 1).clamp(max=5) / raw)
    q = p.clone()
    q[0] = 7.0
    q += 1
    assert torch.equal(unwrap(q), torch.tensor([8.0, 2.0, 3.0]))


def test_repr_shows_shape_alone(p):
    assert repr(p) == "Private(shape=(3,), dtype=torch.float32, device=cpu)"
    assert repr([p]) == f"[{p!r}]"


def test_logging_shows_nothing(p, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = io.StringIO()
    logger = logging.getLogger("test_private")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(stream))
    logger.warning("norms %s", p)
    logger.warning("norm %f", p[0])
    logger.warning("public")
    assert stream.getvalue() == "public\n"


def test_draw_is_carried_and_lost_when_mixed(p):
    assert (p * 2).sum().draw == Draw("batch", 0)
    other = Private(torch.ones(3), Draw("batch", 1))
    assert (p + other).draw is None


def test_rows_wrap_everything():
    raw = rows([3.0, 4.0], [0.0, 1.0])
    private = PrivateRows(raw, Draw("batch", 0))
    for result in (
        private.row_norms(),
        private.row_norms([["w"]]),
        private.inner(private),
        private.cross_gram(raw),
        private.weighted_sums(private.row_norms())["w"],
    ):
        assert isinstance(result, Private)
        assert result.draw == Draw("batch", 0)
    for result in (
        private - private,
        private.rows(torch.tensor([0])),
        private.select(["w"]),
        private.materialise(),
    ):
        assert isinstance(result, PrivateRows)
        assert not isinstance(result, DenseRows)
    assert (private.num_parameters, private.names) == (2, ("w",))
    for look in (lambda: private.num_records, lambda: len(private)):
        with pytest.raises(PrivateError, match="number of records"):
            look()
    with pytest.raises(PrivateError, match="mask"):
        private.rows(private.row_norms() > 2)
    with pytest.raises(PrivateError):
        pickle.dumps(private)


def test_no_record_gets_into_a_sum_twice():
    private = PrivateRows(rows([3.0, 4.0], [0.0, 1.0]), Draw("batch", 0))
    for index in (torch.tensor([0, 0]), torch.tensor([1, -1])):
        with pytest.raises(ValueError, match="more than once"):
            private.rows(index)
    with pytest.raises(PrivateError, match="choice of rows"):
        private.rows(private.row_norms().argsort(descending=True)[:1])
    assert unwrap(private.rows(torch.tensor([1, 0])).row_norms()).tolist() == [1.0, 5.0]


def test_writing_to_the_coordinates_leaves_the_residual_as_it_is():
    raw = DenseGradients({"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])})
    V = held({"w": torch.eye(1, 2)})
    coordinates, residual = PrivateRows(raw, Draw("batch", 0)).split(V)
    assert coordinates.by_record
    assert unwrap(coordinates).flatten().tolist() == [3.0, 0.0]
    coordinates.mul_(-1)
    norms = unwrap(residual.row_norms())
    torch.testing.assert_close(norms, torch.tensor([4.0, 1.0]), rtol=0, atol=0.02)


SAME_ROWS = {
    "select": lambda g: g.select(["w"]),
    "scaled": lambda g: g.scaled(2.0),
    "shifted": lambda g: g.shifted({"w": torch.ones(2)}),
    "times a number": lambda g: 2.0 * g,
    "plus the same": lambda g: g + g,
}


@pytest.mark.parametrize("name", SAME_ROWS)
def test_rows_remember_of_which_records_they_are(name):
    """Rows 0 and 1 of one matrix never meet rows 1 and 2 of another, whatever was done with them."""
    whole = PrivateRows(DenseGradients({"w": torch.arange(6.0).view(3, 2)}), Draw("batch", 0))
    made = SAME_ROWS[name](whole.rows(torch.tensor([0, 1])))
    made - whole.rows(torch.tensor([0, 1]))
    with pytest.raises(PrivateError, match="same records"):
        made - whole.rows(torch.tensor([1, 2]))
    assert made.draw == whole.draw
    weights = Private(torch.tensor([1.0, 0.0, 2.0]))
    summed = [whole.weighted_sums(given)["w"] for given in (weights, {"w": weights})]
    assert [unwrap(one).tolist() for one in summed] == [[8.0, 11.0]] * 2


def test_parts_of_a_draw_are_joined_in_an_order(p):
    for parts in ([p], [Private(one, p.draw) for one in SECRET.split(1)]):
        joined = join(parts, torch.tensor([2, 0, 1]))
        assert (unwrap(joined).tolist(), joined.by_record, joined.draw) == ([2.0, 3.0, 1.0], True, p.draw)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kept", [torch.float32, torch.float64])
@pytest.mark.parametrize("added", [torch.float32, torch.float64])
def test_a_sum_is_added_in_the_memory_of_the_total(kept, added, turned):
    total, more = torch.ones(4, 4, dtype=kept), torch.arange(16.0).view(4, 4).to(added)
    given = {"w": more.t() if turned else more, "v": Private(more)}
    totals = {"w": total, "v": total.clone(), "rest": total}
    found = add_exact(totals, given)
    assert found.keys() == given.keys()
    assert found["w"] is total
    assert found["v"] is totals["v"]
    assert torch.equal(found["w"].double(), 1 + unwrap(given["w"]).double())
    assert torch.equal(found["v"].double(), 1 + more.double())

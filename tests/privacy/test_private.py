"""A private value computes, and leaves by no way but the ledger."""

import copy
import io
import itertools
import logging
import math
import pickle

import numpy as np
import pytest
import torch
from privacy_rows import rows

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
    "if": _if,
    "item": lambda p: p[0].item(),
    "numpy": lambda p: p.numpy(),
    "np.asarray": lambda p: np.asarray(p),
    "np.float64": lambda p: np.float64(p[0]),
    "str": lambda p: str(p),
    "format": lambda p: f"{p}",
    "percent": lambda p: "%s" % p,  # noqa: UP031
    "index": lambda p: [1, 2, 3, 4][p.long()[0]],
    "range": lambda p: range(p.long()[0]),
    "in": lambda p: 3.0 in p,
    "sorted": lambda p: sorted(p),
    "math": lambda p: math.sqrt(p[0]),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "__dlpack__": lambda p: p.__dlpack__(),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "equal": lambda p: torch.equal(p, SECRET),
    "is_nonzero": lambda p: torch.is_nonzero(p[0]),
    "nonzero": lambda p: torch.nonzero(p > 1),
    "masked_select": lambda p: torch.masked_select(torch.arange(3), p > 1),
    "unique": lambda p: torch.unique(p),
    "mask index": lambda p: torch.arange(3)[p > 1],
    "bincount": lambda p: torch.bincount(p.long()),
    "repeat_interleave": lambda p: torch.arange(3).repeat_interleave(p.long()),
    "add_ into public": lambda p: torch.zeros(3).add_(p),
    "setitem into public": lambda p: torch.zeros(3).__setitem__(0, p[0]),
    "out=": lambda p: torch.add(p, 1, out=torch.zeros(3)),
    "index_add_": lambda p: torch.zeros(3).index_add_(0, torch.arange(3), p),
    "scatter_": lambda p: torch.zeros(4).scatter_(0, p.long(), 1.0),
    "fill_": lambda p: torch.zeros(3).fill_(p[0]),
    "alpha": lambda p: torch.add(torch.zeros(3), torch.ones(3), alpha=p[0]),
    "torch.full": lambda p: torch.full((2,), p[0]),
    "share_memory_": lambda p: p.share_memory_(),
    "bytes": lambda p: bytes(p.to(torch.uint8)),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_value_does_not_leave(way, p):
    with pytest.raises((PrivateError, TypeError)) as error:
        WAYS[way](p)
    assert "3.0" not in str(error.value)
    assert way != "float" or "ledger.release" in str(error.value)


STAYS = {
    "torch.tensor": lambda p: torch.tensor(p),
    "detach": lambda p: p.detach(),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "deepcopy": lambda p: copy.deepcopy(p),
    "stack": lambda p: torch.stack([p[0], torch.tensor(1.0)]),
    "cat": lambda p: torch.cat([torch.zeros(1), p]),
    "public + private": lambda p: torch.ones(3) + p,
    "where": lambda p: torch.where(p > 1, 1.0, 0.0),
    "matmul": lambda p: torch.ones(2, 3) @ p,
    "norm": lambda p: p.norm(),
    "topk": lambda p: torch.topk(p, 2).indices,
    "gather": lambda p: torch.arange(5.0)[p.long()],
    "einsum": lambda p: torch.einsum("i,i->", p, SECRET),
    "isfinite any": lambda p: torch.isfinite(p).any(),
    "in place": lambda p: p.clone().add_(1),
    "parameter": lambda p: torch.nn.Parameter(p).data,
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
    assert (p * 2).sum().draw == Draw("batch", 0)
    assert (p + Private(torch.ones(3), Draw("batch", 1))).draw is None


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
    assert repr(p) == "Private(shape=(3,), dtype=torch.float32, device=cpu)"


def test_rows_wrap_everything():
    raw = rows([3.0, 4.0], [0.0, 1.0])
    private = PrivateRows(raw, Draw("batch", 0))
    norms = private.row_norms()
    sums = private.weighted_sums(norms)["w"]
    for result in (norms, private.row_norms([["w"]]), private.inner(private), private.cross_gram(raw), sums):
        assert isinstance(result, Private)
        assert result.draw == Draw("batch", 0)
    of_one = private.rows(torch.tensor([0]))
    for result in (private - private, of_one, private.select(["w"]), private.materialise()):
        assert isinstance(result, PrivateRows)
        assert not isinstance(result, DenseGradients)
    assert (private.num_parameters, private.names) == (2, ("w",))
    assert unwrap(private.rows(torch.tensor([1, 0])).row_norms()).tolist() == [1.0, 5.0]
    for refused, match in {
        lambda: private.num_records: "number of records",
        lambda: len(private): "number of records",
        lambda: private.rows(norms > 2): "mask",
        lambda: private.rows(norms.argsort(descending=True)[:1]): "choice of rows",
        lambda: private.rows(torch.tensor([0, 0])): "more than once",
        lambda: private.rows(torch.tensor([1, -1])): "more than once",
        lambda: pickle.dumps(private): None,
    }.items():
        with pytest.raises((PrivateError, ValueError), match=match):
            refused()


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
@pytest.mark.parametrize(("kept", "added"), [*itertools.product([torch.float32, torch.float64], repeat=2)])
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

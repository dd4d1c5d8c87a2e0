"""Features fitted on drawn pictures: deterministic, of each record alone, and fitted on no record."""

import inspect

import pytest
import torch

from equipoise.data.features.drawings import draw_pictures, random_views
from equipoise.data.features.drawn import DrawnFeatures
from equipoise.data.features.extractors import extract
from equipoise.data.features.patches import PatchDictionary
from equipoise.data.features.upright import set_upright
from equipoise.data.features.whitening import Whitening
from equipoise.data.records import Records


def test_a_dictionary_equals_its_definition():
    """One response from a patch, its mean, its deviation and the whitening, by hand."""
    pictures = draw_pictures(50, (2, 12, 12))
    layer = PatchDictionary.fit(pictures, atoms=8, width=3, cells=12)
    found = layer(pictures[:2])
    patch = pictures[1, :, 4:7, 6:9].flatten()
    flat = patch - patch.mean()
    normal = flat / (flat.square().mean() + layer.floor).sqrt()
    response = layer.filters.flatten(1) @ normal + layer.offsets
    torch.testing.assert_close(found[1, :, 5, 7], response.clamp(min=0).sqrt(), atol=1e-3, rtol=1e-3)


def test_whitened_features_have_the_covariance_of_white_noise():
    # a known spread of scales: that of a random matrix is at times too wide for float32
    rows = torch.randn(4000, 6) * torch.logspace(-1, 1, 6) @ torch.linalg.qr(torch.randn(6, 6)).Q + 5
    whitening = Whitening.fit(rows.split(700), ridge=0.0)
    white = torch.linalg.solve_triangular(whitening.factor, (rows - whitening.mean).T, upper=False)
    torch.testing.assert_close(torch.cov(white), torch.eye(6), atol=2e-2, rtol=0)
    torch.testing.assert_close(whitening.mean, rows.mean(0), atol=1e-3, rtol=1e-4)
    expected = 4 * torch.nn.functional.normalize(white.T, dim=1)
    torch.testing.assert_close(whitening(rows), expected, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="at least 2"):
        Whitening.fit([rows[:1]])


SMALL = {"shape": (1, 8, 8), "dictionaries": ((16, 3, 4), (16, 5, 2)), "pictures": 100}


@pytest.mark.parametrize("by_views", [False, True])
def test_the_fit_takes_no_records(by_views):
    """Extractors that met other records first give the same features; no fit has a parameter for records."""
    x = torch.randn(5, 1, 8, 8)
    first, second = (DrawnFeatures(**SMALL, by_views=by_views) for _ in range(2))
    first(torch.randn(3, 1, 8, 8))
    second(torch.full((90, 1, 8, 8), 50.0))
    assert torch.equal(first(x), second(x))
    assert set(inspect.signature(draw_pictures).parameters) == {"count", "shape", "seed", "chunk"}
    state = torch.random.get_rng_state()
    assert not torch.equal(first(x), DrawnFeatures(**SMALL, by_views=by_views, seed=1)(x))
    assert torch.equal(state, torch.random.get_rng_state())


def test_whitening_by_views_is_of_the_differences_between_two_views_of_each_drawing():
    features = DrawnFeatures((1, 8, 8), dictionaries=((16, 3, 1),), pictures=2000, ridge=0.0, by_views=True)
    fitted = features._whitening
    generator = torch.Generator().manual_seed(0)
    seen = draw_pictures(2000, (1, 8, 8))[:1000]
    one, other = (features._raw(random_views(seen, generator)) for _ in range(2))
    white = torch.linalg.solve_triangular(fitted.factor, (one - other).T / 2**0.5, upper=False)
    torch.testing.assert_close(torch.cov(white), torch.eye(16), atol=1e-2, rtol=0)
    torch.testing.assert_close(fitted.mean, torch.cat([one, other]).mean(0), atol=1e-4, rtol=1e-4)
    assert DrawnFeatures(**SMALL).config().keys() == features.config().keys() - {"by_views"}


def test_features_of_a_record_do_not_depend_on_the_others():
    extractor = DrawnFeatures(**SMALL)
    records = Records({"input": torch.randn(70, 1, 8, 8)})
    together = extract(records, extractor).fields["input"]
    assert together.shape == (70, 16 * 16 + 16 * 4)
    torch.testing.assert_close(together.norm(dim=1), torch.full((70,), 4.0), atol=1e-2, rtol=0)
    alone = torch.cat([extractor(one) for one in records.fields["input"].split(1)]).half().float()
    assert torch.equal(together, alone)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_each_by_itself(function, images):
    """Bit for bit, in parts of any length and in any order; a blank image and one of NaN among the others."""
    images[3], images[4] = 0, float("nan")
    whole = function(images)
    assert whole.flatten(1).isnan().any(1).nonzero().flatten().tolist() == [4]
    for length in (1, 2, 7, 1024):
        some = images[:30] if length < 7 else images
        parts = torch.cat([function(part) for part in some.split(length)])
        assert torch.equal(parts.nan_to_num(), whole[: len(some)].nan_to_num()), length
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    assert torch.equal(function(images[order]).nan_to_num(), whole[order].nan_to_num())


@pytest.mark.parametrize(
    "size", [(1027, 3, 8, 12), (130, 1, 28, 28), (5, 3, 120, 120), (9, 1, 1, 9)], ids=lambda size: f"{size}"
)
def test_an_image_is_set_upright_with_the_same_bits_beside_any_others(size, threads):
    images = torch.randn(size)
    assert_each_by_itself(set_upright, images)
    assert not set_upright(images)[3].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("network", [None, "contrastive"])
@pytest.mark.parametrize("upright", [False, True])
def test_features_of_an_image_have_the_same_bits_beside_any_others(upright, network, threads):
    features = DrawnFeatures(**SMALL, upright=upright, with_mirror_image=not upright, network=network)
    assert_each_by_itself(features, torch.randn(1027, 1, 8, 8))

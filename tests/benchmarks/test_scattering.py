"""The scattering transform against its definition, and the features of the bench that use it."""

import pytest
import torch

from benchmarks.scattering import PooledScattering, Scattering2d, ScatteringFeatures, TokenBags
from equipoise.data.features.extractors import extract
from equipoise.data.records import Records


def pictures(n: int = 5, size: int = 8, channels: int = 1, seed: int = 0) -> Records:
    generator = torch.Generator().manual_seed(seed)
    return Records(
        {"input": torch.randn(n, channels, size, size, generator=generator), "label": torch.arange(n) % 2},
        num_classes=2,
    )


def test_scattering_equals_its_definition_in_space() -> None:
    """Order 0, 1 and 2 from direct circular convolutions on the full grid, subsampled only at the end."""
    size, scales, angles = 16, 2, 4
    transform = Scattering2d((size, size), scales, angles)
    x = torch.randn(2, 1, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (4,) * 4, mode="reflect")
    n = size + 8
    at = torch.arange(n, dtype=torch.float64)
    at = torch.where(at < n / 2, at, at - n)  # positions around the origin of a periodic grid

    def periodic(function) -> torch.Tensor:
        total = torch.zeros(n, n, dtype=torch.complex128)
        for i in (-2, -1, 0, 1, 2):
            for k in (-2, -1, 0, 1, 2):
                total += function((at + i * n).unsqueeze(1), (at + k * n).unsqueeze(0))
        return total

    def gabor(sigma: float, slant: float, theta: torch.Tensor, xi: float) -> torch.Tensor:
        c, s = theta.cos(), theta.sin()

        def value(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            u, v = c * a + s * b, c * b - s * a
            wave = torch.exp(1j * xi * u)
            return (
                slant
                / (2 * torch.pi * sigma**2)
                * torch.exp(-(u**2 + slant**2 * v**2) / (2 * sigma**2))
                * wave
            )

        return periodic(value)

    def convolve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft2(torch.fft.fft2(a) * torch.fft.fft2(b))

    wavelets = {}
    for j in range(scales):
        for a in range(angles):
            theta = torch.tensor((angles // 2 - 1 - a) * torch.pi / angles)
            sigma, slant = 0.8 * 2**j, 4 / angles
            g, e = gabor(sigma, slant, theta, 0.75 * torch.pi / 2**j), gabor(sigma, slant, theta, 0.0)
            wavelets[j, a] = g - g.sum() / e.sum() * e
    low = gabor(0.8 * 2 ** (scales - 1), 1.0, torch.tensor(0.0), 0.0)

    def smooth(u: torch.Tensor) -> torch.Tensor:
        return convolve(u, low).real[..., 4:-4:4, 4:-4:4]

    expected = [smooth(padded)]
    first = {key: convolve(padded, psi).abs() for key, psi in wavelets.items()}
    expected += [smooth(u) for u in first.values()]
    exact = 1 + angles  # order 0 and the finest scale of order 1 involve no approximation
    for a1 in range(angles):
        expected += [smooth(convolve(first[0, a1], wavelets[1, a2]).abs()) for a2 in range(angles)]
    wanted = torch.cat(expected, 1)
    got = transform(x).double()
    assert got.shape == wanted.shape == (2, 1 + scales * angles + angles**2, 4, 4)
    torch.testing.assert_close(got[:, :exact], wanted[:, :exact], atol=1e-5, rtol=1e-5)
    # the moduli of the coarser scale are kept on a coarser grid, whose aliasing is small but not nil
    assert (got - wanted).norm() < 0.02 * wanted.norm()


def test_scattering_of_a_constant_has_only_order_zero() -> None:
    out = Scattering2d((32, 32))(torch.full((1, 3, 32, 32), 2.5)).unflatten(1, (3, 81))
    torch.testing.assert_close(out[:, :, 0], torch.full((1, 3, 8, 8), 2.5), atol=1e-4, rtol=0)
    assert out[:, :, 1:].abs().max() < 1e-4


def test_wavelets_of_order_one_see_their_direction() -> None:
    rows = torch.arange(32.0)
    stripes = torch.cos(0.75 * torch.pi * rows).reshape(1, 1, 32, 1).expand(1, 1, 32, 32)
    energy = Scattering2d((32, 32))(stripes)[0, 1:9].mean((1, 2))
    assert energy.argmax() == 3  # angle 0: along the first axis
    assert energy[3] > 5 * energy[7]


def test_colour_channels_are_transformed_alone() -> None:
    x = torch.randn(2, 3, 8, 12)
    transform = Scattering2d((8, 12))
    together = transform(x).unflatten(1, (3, 81))
    for c in range(3):
        torch.testing.assert_close(together[:, c], transform(x[:, c : c + 1]))


def test_features_of_a_record_do_not_depend_on_the_others() -> None:
    records = pictures(7)
    extractor = ScatteringFeatures((8, 8))
    whole = extract(records, extractor).fields["input"]
    alone = torch.cat(
        [extract(records.subset(torch.tensor([i])), extractor).fields["input"] for i in range(7)]
    )
    torch.testing.assert_close(whole, alone, atol=2e-3, rtol=2e-3)
    groups = Scattering2d((8, 8))(records.fields["input"]).reshape(7, 27, -1)
    variance, mean = torch.var_mean(groups, 2, correction=0, keepdim=True)
    expected = (groups - mean) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(whole.reshape(7, 27, -1), expected, atol=2e-3, rtol=2e-3)


def test_group_normalisation_can_be_left_out() -> None:
    records = pictures()
    plain = extract(records, ScatteringFeatures((8, 8), num_groups=None)).fields["input"]
    torch.testing.assert_close(plain, Scattering2d((8, 8))(records.fields["input"]), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scattering2d((30, 28)),
        lambda: Scattering2d((4, 4)),
        lambda: Scattering2d((8, 8), scales=0),
        lambda: ScatteringFeatures((8, 8), num_groups=80),
        lambda: Scattering2d((8, 8))(torch.zeros(2, 8, 8)),
        lambda: Scattering2d((8, 8))(torch.zeros(2, 1, 8, 12)),
    ],
)
def test_wrong_shapes_and_constants_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"shape|scales|num_groups"):
        make()


def test_shapes_of_features() -> None:
    assert ScatteringFeatures((28, 28))(torch.randn(2, 1, 28, 28)).shape == (2, 81, 7, 7)
    assert PooledScattering((28, 28))(torch.randn(2, 1, 28, 28)).shape == (2, 25, 4, 4)
    bags = TokenBags(8, width=6)(torch.tensor([[3, 5, 0, 0], [0, 0, 0, 0]]))
    assert bags[1].norm() == 0 < bags[0].norm()

"""The scattering transform against its definition, and the features of the bench that use it."""

import torch

from benchmarks.scattering import Scattering2d


def test_scattering_equals_its_definition_in_space():
    """Order 0, 1 and 2 from direct circular convolutions on the full grid, subsampled only at the end."""
    size, scales, angles = 16, 2, 4
    transform = Scattering2d((size, size), scales, angles)
    x = torch.randn(2, 1, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (4,) * 4, mode="reflect")
    n = size + 8
    at = torch.arange(n, dtype=torch.float64)
    at = torch.where(at < n / 2, at, at - n)  # positions around the origin of a periodic grid

    def periodic(function):
        shifts = [(i, k) for i in range(-2, 3) for k in range(-2, 3)]
        return sum(function((at + i * n).unsqueeze(1), (at + k * n).unsqueeze(0)) for i, k in shifts)

    def gabor(sigma, slant, theta, xi):
        c, s = theta.cos(), theta.sin()

        def value(a, b):
            u, v = c * a + s * b, c * b - s * a
            envelope = torch.exp(-(u**2 + slant**2 * v**2) / (2 * sigma**2))
            return slant / (2 * torch.pi * sigma**2) * envelope * torch.exp(1j * xi * u)

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

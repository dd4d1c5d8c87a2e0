"""The two-dimensional scattering transform: fixed features that need no training and so no privacy.

For an image x, Morlet wavelets psi at scales 2^j (j = 0 .. J-1) and L angles, and a Gaussian low-pass phi at
scale 2^J:

    S0 = x * phi,    S1 = |x * psi_1| * phi,    S2 = ||x * psi_1| * psi_2| * phi   with j_2 > j_1,

each kept at every 2^J-th pixel: 1 + J L + L^2 J (J - 1) / 2 channels, 81 for J = 2, L = 8. The wavelets are
those of J. Bruna, S. Mallat, "Invariant scattering convolution networks", IEEE TPAMI 35, 2013, with the
constants in common use (sigma = 0.8 * 2^j, centre frequency 3 pi / 4 * 2^-j, eccentricity 4 / L). That a
linear model on such features beats deep networks at small epsilon is due to F. Tramer, D. Boneh,
"Differentially private learning needs better features (or much more data)", ICLR 2021.

Filters are built in the Fourier domain, where sampling in space is a sum over aliases,

    psi^(w) = sum_k g(w + 2 pi k - xi) - kappa g(w + 2 pi k),     g(w) = exp(-sigma^2 (u^2 + v^2 / slant^2) /
    2)

with u, v the components of w along and across the wavelet's direction and kappa such that psi^(0) = 0. The
low-pass is isotropic, hence separable: with the subsampling and the cropping of the border it is one small
matrix A a resolution, S = A U A^T, which is much cheaper than going through the Fourier domain again.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PooledScattering", "Scattering2d", "ScatteringFeatures", "TokenBags"]


@dataclass(frozen=True)
class Scattering2d:
    """The scattering transform of images ``[n, c, h, w]`` -> ``[n, c * num_channels, h / 2^scales, w /
    2^scales]``.

    Every image is transformed alone and nothing is fitted, so the transform may be applied to private records
    freely.

    Attributes:
        shape: ``(h, w)``, both divisible by ``2 ** scales`` and larger than it.
        scales: J, the number of dyadic scales.
        angles: L, the number of orientations.

    >>> transform = Scattering2d((28, 28))
    >>> transform.num_channels, transform(torch.randn(2, 1, 28, 28)).shape
    (81, torch.Size([2, 81, 7, 7]))
    """

    shape: tuple[int, int]
    scales: int = 2
    angles: int = 8
    _wavelets: tuple[tuple[Tensor, ...], ...] = field(init=False, repr=False, compare=False)
    _lowpass: tuple[tuple[Tensor, Tensor], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stride = 2**self.scales
        if self.scales < 1 or self.angles < 1:
            raise ValueError(f"scales={self.scales} and angles={self.angles} must be at least 1.")
        if len(self.shape) != 2 or any(size % stride or size <= stride for size in self.shape):
            raise ValueError(
                f"shape={self.shape} must be two sizes that 2 ** scales = {stride} divides and is smaller "
                "than. Pad or crop the images, or take fewer scales."
            )
        padded = tuple(size + 2 * stride for size in self.shape)
        wavelets = []
        for j in range(self.scales):
            full = torch.stack([self._wavelet(padded, j, angle) for angle in range(self.angles)])
            # the same wavelet on the coarser grids: its response at the frequencies that these grids can
            # hold; the division belongs to the subsampling from grid r to grid j, which averages over aliases
            wavelets.append(
                tuple((_coarse(full, 2**r) / 4 ** (j - r)).to(torch.complex64) for r in range(j + 1))
            )
        lowpass = [
            tuple(_lowpass_matrix(size, r, self.scales).to(torch.float32) for size in padded)
            for r in range(self.scales)
        ]
        object.__setattr__(self, "_wavelets", tuple(wavelets))
        object.__setattr__(self, "_lowpass", tuple(lowpass))

    def _wavelet(self, size: tuple[int, ...], j: int, angle: int) -> Tensor:
        sigma, slant, frequency = 0.8 * 2**j, 4.0 / self.angles, 0.75 * math.pi / 2**j
        theta = (self.angles // 2 - 1 - angle) * math.pi / self.angles
        carrier = _gabor(size, sigma, slant, theta, frequency)
        envelope = _gabor(size, sigma, slant, theta, 0.0)
        return carrier - carrier[0, 0] / envelope[0, 0] * envelope

    @property
    def num_channels(self) -> int:
        """Output channels for each input channel."""
        j, length = self.scales, self.angles
        return 1 + j * length + length**2 * j * (j - 1) // 2

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """The shape of one output for one input channel."""
        return self.num_channels, self.shape[0] // 2**self.scales, self.shape[1] // 2**self.scales

    def __call__(self, images: Tensor) -> Tensor:
        """The coefficients, float32: order 0, then order 1 by (j1, angle1), then order 2 by (j1, angle1, j2,
        angle2).

        Args:
            images: ``[n, c, h, w]``, floating point.

        Raises:
            ValueError: another shape than the one the filters were built for.
        """
        if images.ndim != 4 or tuple(images.shape[-2:]) != self.shape:
            raise ValueError(
                f"images has shape {list(images.shape)}; this transform takes [n, c, {self.shape[0]}, "
                f"{self.shape[1]}]."
            )
        n, c = images.shape[:2]
        margin = 2**self.scales
        x = F.pad(images.to(torch.float32), (margin,) * 4, mode="reflect").reshape(n * c, 1, *self._padded)
        spectrum = torch.fft.fft2(x)
        zeroth, first, second = self._smooth(x, 0), [], []
        for j1 in range(self.scales):
            u1 = torch.fft.ifft2(_filtered(spectrum, self._wavelets[j1][0], 2**j1)).abs()
            first.append(self._smooth(u1, j1))
            if j1 + 1 == self.scales:
                continue
            spectrum1 = torch.fft.fft2(u1).unsqueeze(2)
            by_scale = []
            for j2 in range(j1 + 1, self.scales):
                u2 = torch.fft.ifft2(_filtered(spectrum1, self._wavelets[j2][j1], 2 ** (j2 - j1))).abs()
                by_scale.append(self._smooth(u2, j2))
            second.append(torch.cat(by_scale, 2).flatten(1, 2))
        return torch.cat([zeroth, *first, *second], 1).reshape(n, -1, *self.output_shape[1:])

    @property
    def _padded(self) -> tuple[int, int]:
        return self.shape[0] + 2 * 2**self.scales, self.shape[1] + 2 * 2**self.scales

    def _smooth(self, u: Tensor, resolution: int) -> Tensor:
        rows, columns = self._lowpass[resolution]
        return rows @ (u @ columns.T)


def _gabor(size: tuple[int, ...], sigma: float, slant: float, theta: float, frequency: float) -> Tensor:
    """The Fourier transform of a sampled Gaussian of unit gain times a plane wave, ``size``, float64."""
    cos, sin = math.cos(theta), math.sin(theta)
    axes = [2 * math.pi * torch.fft.fftfreq(s, dtype=torch.float64) for s in size]
    total = torch.zeros(*size, dtype=torch.float64)
    for k0, k1 in itertools.product(range(-2, 3), repeat=2):
        w0 = (axes[0] + 2 * math.pi * k0).unsqueeze(1)
        w1 = (axes[1] + 2 * math.pi * k1).unsqueeze(0)
        along, across = cos * w0 + sin * w1 - frequency, cos * w1 - sin * w0
        total += torch.exp(-0.5 * sigma**2 * (along**2 + across**2 / slant**2))
    return total


def _coarse(response: Tensor, factor: int) -> Tensor:
    """A frequency response ``[..., h, w]`` at the frequencies of a grid ``factor`` times coarser."""
    for axis in (-2, -1):
        size = response.shape[axis]
        kept = torch.fft.fftfreq(size // factor, d=factor / size).round().long() % size
        response = response.index_select(response.ndim + axis, kept)
    return response


def _lowpass_matrix(size: int, resolution: int, scales: int) -> Tensor:
    """Gaussian smoothing at scale ``2 ** (scales - 1)`` of a signal already subsampled by ``2 **
    resolution``, one axis.

    Returns:
        float64 ``[m, size / 2^resolution]``: circular convolution, subsampling to the step ``2 ** scales``
        and cropping of one sample at each end in one.
    """
    points = size // 2**resolution
    frequency = 2 * math.pi * torch.fft.fftfreq(points, dtype=torch.float64) / 2**resolution
    sigma = 0.8 * 2 ** (scales - 1)
    response = sum(
        (torch.exp(-0.5 * (sigma * (frequency + 2 * math.pi * k)) ** 2) for k in range(-2, 3)),
        torch.zeros(points),
    )
    kernel = torch.fft.ifft(response).real
    centres = torch.arange(1, size // 2**scales - 1) * 2 ** (scales - resolution)
    return kernel[(centres.unsqueeze(1) - torch.arange(points)) % points]


def _filtered(spectrum: Tensor, response: Tensor, factor: int) -> Tensor:
    """The spectrum of every ``factor``-th sample of the filtered signal: the sum over the aliases of the
    product.

    Slices and in-place products keep it within the cache; a reduction over a reshaped product takes five
    times as long.
    """
    h, w = spectrum.shape[-2] // factor, spectrum.shape[-1] // factor
    total: Tensor | None = None
    for i, k in itertools.product(range(factor), repeat=2):
        window = (..., slice(i * h, (i + 1) * h), slice(k * w, (k + 1) * w))
        if total is None:
            total = spectrum[window] * response[window]
        else:
            total.addcmul_(spectrum[window], response[window])
    assert total is not None
    return total


@dataclass(frozen=True)
class ScatteringFeatures:
    """Scattering coefficients with group normalisation per record.

    Attributes:
        shape: ``(h, w)`` of the images.
        scales: J of the transform.
        angles: L of the transform.
        num_groups: groups of channels that are normalised together; None leaves the coefficients as they are.

    Inputs are ``[k, c, h, w]``, features float32 ``[k, c * num_channels, h / 2^scales, w / 2^scales]``.

    >>> ScatteringFeatures((28, 28))(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 81, 7, 7])
    """

    shape: tuple[int, int]
    scales: int = 2
    angles: int = 8
    num_groups: int | None = 27

    def __post_init__(self) -> None:
        object.__setattr__(self, "_transform", Scattering2d(self.shape, self.scales, self.angles))
        channels = self._scattering().num_channels
        if self.num_groups is not None and (self.num_groups < 1 or channels % self.num_groups):
            raise ValueError(
                f"num_groups={self.num_groups} must divide the {channels} channels of the transform."
            )

    @property
    def num_channels(self) -> int:
        """Features a position for each input channel."""
        return self._scattering().num_channels

    def _scattering(self) -> Scattering2d:
        return self._transform  # type: ignore[attr-defined]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The features of a batch."""
        features = self._scattering()(inputs)
        if self.num_groups is None:
            return features
        return F.group_norm(features, self.num_groups * inputs.shape[1])

    def config(self) -> dict[str, object]:
        """Name, version and constants."""
        return {"extractor": "scattering", "version": 1, **asdict(self)}


@dataclass(frozen=True)
class PooledScattering:
    """Scattering with four angles, each map of coefficients averaged to 4 x 4: 400 features a channel.

    >>> PooledScattering((28, 28))(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 25, 4, 4])
    """

    shape: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_features", ScatteringFeatures(self.shape, angles=4, num_groups=5))

    def _scattering(self) -> ScatteringFeatures:
        return self._features  # type: ignore[attr-defined]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The features of a batch."""
        return F.adaptive_avg_pool2d(self._scattering()(inputs), 4)

    def config(self) -> dict[str, object]:
        """Name, version and constants."""
        return {**self._scattering().config(), "pooled": 4}


@dataclass(frozen=True)
class TokenBags:
    """A text's token vectors, random signs from a public seed, added up and scaled; token 0 is padding.

    Where all tokens differ, features have a norm of about 4.

    >>> TokenBags(8, width=6)(torch.tensor([[3, 5, 0, 0], [0, 0, 0, 0]])).norm(dim=1)[1]
    tensor(0.)
    """

    vocabulary: int
    width: int = 512

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (self.vocabulary, self.width), generator=generator).float() * 2 - 1
        signs[0] = 0
        object.__setattr__(self, "_vectors", signs)

    def _signs(self) -> Tensor:
        return self._vectors  # type: ignore[attr-defined]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The features of a batch of token ids."""
        present = (inputs != 0).sum(1, keepdim=True).clamp(min=1)
        return F.embedding(inputs, self._signs()).sum(1) / present.sqrt() / self.width**0.5 * 4

    def config(self) -> dict[str, object]:
        """Name, version and constants."""
        return {"extractor": "token bags", "version": 1, "vocabulary": self.vocabulary, "width": self.width}

"""Pictures that the library draws itself: a public stand-in for private images, made by random processes.

What may be fitted on them (dictionaries, thresholds, covariances) costs no privacy, since no record is read.
They are not free of knowledge: that pictures hold things with outlines, that a thing hides what is behind it,
that people draw with strokes, that many things are mirror-symmetric, that grey pictures often show one light
thing in the middle of a dark ground, and that natural texture is rougher at large scales than at small ones,
are priors of a human kind. No picture, photograph, font or label of any data set went into them.

Grey pictures are a third strokes, a third silhouettes and a third scenes; colour pictures are scenes.

* strokes: quadratic Bezier curves drawn with a round pen on a dark ground;
* silhouettes: a union of star-shaped blobs and boxes, half of them mirror-symmetric, filled with texture and
  covered by further shapes, on a dark ground;
* scenes: shapes that hide each other, the dead leaves model of G. Matheron (1968; for natural images A. B.
  Lee, D. Mumford, J. Huang, "Occlusion models for natural images", IJCV 41, 2001).

That features can be learnt from such processes is due to M. Baradad, J. Wulff, T. Wang, P. Isola, A.
Torralba, "Learning to see by looking at noise", NeurIPS 2021, and, for private learning, X. Tang, A. Panda,
V. Sehwag, P. Mittal, "Differentially private image classification by learning priors from random processes",
NeurIPS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.data.readers.images import standardise_each


def draw_pictures(count: int, shape: tuple[int, int, int], *, seed: int = 0, chunk: int = 512) -> Tensor:
    """Random pictures ``[count, c, h, w]``, float32, standardised one by one as the readers' images are.

    Args:
        count: how many.
        shape: ``(c, h, w)``; three channels are colours, others are grey levels that vary independently.
        seed: public; equal seeds draw equal pictures, and the first of many are not those of few.
        chunk: pictures drawn at once.

    >>> draw_pictures(3, (1, 28, 28)).shape
    torch.Size([3, 1, 28, 28])
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        _Canvas(min(chunk, count - start), shape, generator).pictures() for start in range(0, count, chunk)
    ]
    return standardise_each(torch.cat(drawn), scale=1.0, floor=1 / 255)


def random_views(pictures: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Of each picture ``[n, c, h, w]`` one: moved, turned, mirrored, and with other contrast, blur and noise.

    The random numbers are the generator's, or those of torch's global one.
    """
    n, channels = len(pictures), pictures.shape[1]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(n, *shape).uniform_(low, high, generator=generator)

    def chance(probability: float) -> Tensor:
        return (torch.rand(n, 1, 1, 1, generator=generator) < probability).float()

    scale, aspect, angle = uniform(0.55, 1.0), uniform(-0.25, 0.25).exp(), uniform(-0.26, 0.26)
    mirror = (torch.rand(n, generator=generator) < 0.5).float() * 2 - 1
    wide, high = scale * aspect, scale / aspect
    place = torch.zeros(n, 2, 3)
    place[:, 0, 0], place[:, 0, 1] = mirror * wide * angle.cos(), -wide * angle.sin()
    place[:, 1, 0], place[:, 1, 1] = mirror * high * angle.sin(), high * angle.cos()
    place[:, :, 2] = uniform(-0.3, 0.3, 2)
    grid = F.affine_grid(place, list(pictures.shape), align_corners=False)
    seen = F.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    seen = seen.sign() * seen.abs().pow(uniform(-0.5, 0.5, 1, 1, 1).exp())
    if channels == 3:
        seen = seen * uniform(0.6, 1.4, 3, 1, 1) + uniform(-0.3, 0.3, 3, 1, 1)
        seen = torch.lerp(seen, seen.mean(1, keepdim=True).expand_as(seen), chance(0.2))
    blurred = F.avg_pool2d(F.pad(seen, (1,) * 4, mode="replicate"), 3, 1)
    seen = torch.lerp(seen, blurred, chance(0.3))
    grain = torch.randn(seen.shape, generator=generator) * uniform(0, 0.15, 1, 1, 1)
    return standardise_each(seen + grain, scale=1.0, floor=1e-3)


class _Canvas:
    """Many pictures that are drawn at once, each with random numbers of its own."""

    def __init__(self, count: int, shape: tuple[int, int, int], generator: torch.Generator) -> None:
        self.count, self.generator = count, generator
        self.channels, *self.size = shape
        h, w = self.size
        longer = max(h, w)
        # the middle of the picture is (0, 0), the ends of its longer side are at -1 and 1
        self.y = ((torch.arange(h) * 2 + 1 - h) / longer).reshape(1, h, 1)
        self.x = ((torch.arange(w) * 2 + 1 - w) / longer).reshape(1, 1, w)
        self.pixel = 2 / longer

    def pictures(self) -> Tensor:
        """Each picture by one painter, chosen at random."""
        painters: list[Callable[[], Tensor]] = [self._scene]
        if self.channels == 1:
            painters += [self._strokes, self._silhouettes]
        chosen = torch.randint(len(painters), (self.count,), generator=self.generator)
        whole = torch.empty(self.count, self.channels, *self.size)
        everyone = self.count
        for number, painter in enumerate(painters):
            mine = (chosen == number).nonzero().flatten()
            self.count = len(mine)
            if self.count:
                whole[mine] = painter()
        self.count = everyone
        return whole

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(self.count, *shape, generator=self.generator)

    def _chance(self, probability: float) -> Tensor:
        """1 with the probability, else 0, ``[n, 1, 1]``."""
        return (self._uniform(0, 1, 1, 1) < probability).float()

    def _scene(self) -> Tensor:
        picture = self._fill()
        for leaf in range(10):
            # large leaves first, so that the last ones do not hide everything
            inside = self._shape(0.15, 0.9 * 0.85**leaf, 1.0)
            picture = self._covered(picture, inside, self._fill())
        return picture

    def _silhouettes(self) -> Tensor:
        mirrored = self._chance(0.6)
        x = torch.where(mirrored > 0, self.x.abs(), self.x)
        outline = self._shape(0.3, 0.9, 0.25, x)
        for _ in range(3):
            part = self._shape(0.1, 0.7, 0.6, x) * self._chance(0.6)
            outline = torch.maximum(outline, part)
        picture = self._fill()
        for _ in range(3):
            inside = self._shape(0.1, 0.6, 0.7, x) * self._chance(0.5)
            picture = self._covered(picture, inside, self._fill())
        light = 0.25 + 0.75 * picture.clamp(0, 1)
        return light * outline.unsqueeze(1)

    def _strokes(self) -> Tensor:
        ink = torch.zeros(self.count, *self.size)
        width = self._uniform(0.04, 0.14, 1, 1)
        sheared = self._uniform(-0.3, 0.3, 1)
        start = self._uniform(-0.65, 0.65, 2)
        for number in range(4):
            middle, end = self._uniform(-0.9, 0.9, 2), self._uniform(-0.65, 0.65, 2)
            line = self._curve(start, middle, end, sheared, width)
            ink = torch.maximum(ink, line if number < 1 else line * self._chance(0.6))
            start = torch.where(self._chance(0.7)[:, 0] > 0, end, self._uniform(-0.65, 0.65, 2))
        return ink.unsqueeze(1)

    def _curve(self, start: Tensor, middle: Tensor, end: Tensor, shear: Tensor, width: Tensor) -> Tensor:
        """How much of each pixel the pen covers: the nearest of twenty points on a Bezier curve."""
        t = torch.linspace(0, 1, 20).reshape(1, -1, 1)
        points = (1 - t) ** 2 * start[:, None] + 2 * t * (1 - t) * middle[:, None] + t**2 * end[:, None]
        rows, columns = points[..., 0, None, None], (points[..., 1] + shear * points[..., 0])[..., None, None]
        far = ((self.y - rows).square() + (self.x - columns).square()).amin(1).sqrt()
        return ((width - far) / self.pixel + 0.5).clamp(0, 1)

    def _shape(self, least: float, most: float, spread: float, x: Tensor | None = None) -> Tensor:
        """How much of each pixel lies in a random shape: a star with a wavy outline, or a rounded box."""
        x = self.x if x is None else x
        centre = self._uniform(-spread, spread, 2, 1, 1)
        radius = self._uniform(least, max(most, least), 1, 1)
        angle, slant = self._uniform(-math.pi, math.pi, 1, 1), self._uniform(0.35, 1, 1, 1)
        upright = self._chance(0.5)
        angle = angle * (1 - upright)
        dy, dx = self.y - centre[:, 0], x - centre[:, 1]
        u, v = angle.cos() * dx + angle.sin() * dy, (angle.cos() * dy - angle.sin() * dx) / slant
        turned = torch.atan2(v, u)
        wave = sum(
            (
                self._uniform(0, 0.5 / k, 1, 1) * torch.cos(k * turned + self._uniform(0, 2 * math.pi, 1, 1))
                for k in (2, 3, 5)
            ),
            torch.zeros(()),
        )
        star = radius * (1 + wave) - torch.hypot(u, v)
        box = radius - torch.maximum(u.abs(), v.abs())
        return (torch.where(self._chance(0.4) > 0, box, star) / self.pixel + 0.5).clamp(0, 1)

    def _fill(self) -> Tensor:
        """A level, a slope, stripes and rough texture, ``[n, c, h, w]``."""
        grey = self._uniform(0, 1, 1, 1)
        slope = self._uniform(-0.4, 0.4, 2, 1, 1)
        grey = grey + slope[:, 0] * self.y + slope[:, 1] * self.x
        wave = self._uniform(-1, 1, 2, 1, 1) * (0.6 * math.pi / self.pixel)
        stripes = torch.sin(wave[:, 0] * self.y + wave[:, 1] * self.x + self._uniform(0, 2 * math.pi, 1, 1))
        grey = grey + stripes * self._uniform(0, 0.3, 1, 1) * self._chance(0.3)
        tint = self._uniform(-0.25, 0.25, self.channels, 1, 1) if self.channels > 1 else 0.0
        rough = self._texture(1) + (0.3 * self._texture(self.channels) if self.channels > 1 else 0.0)
        return grey.unsqueeze(1) + tint + rough * self._uniform(0, 0.25, 1, 1, 1)

    def _texture(self, channels: int) -> Tensor:
        """Noise on grids of several widths, the coarse ones stronger."""
        total = torch.zeros(self.count, channels, *self.size)
        for cells in (4, 8, 16, max(self.size)):
            noise = torch.randn(self.count, channels, cells, cells, generator=self.generator)
            smooth = F.interpolate(noise, tuple(self.size), mode="bilinear", align_corners=False)
            total += smooth * self._uniform(0, 1, 1, 1, 1) * cells**-0.5 * 2
        return total

    @staticmethod
    def _covered(picture: Tensor, inside: Tensor, fill: Tensor) -> Tensor:
        inside = inside.unsqueeze(1)
        return picture * (1 - inside) + fill * inside

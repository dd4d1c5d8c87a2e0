"""Features fitted on pictures that the library draws itself: of patches and of a network, whitened."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.data.features.contrastive import ContrastiveNet
from equipoise.data.features.drawings import draw_pictures, random_views
from equipoise.data.features.patches import PatchDictionary
from equipoise.data.features.upright import set_upright
from equipoise.data.features.whitening import Whitening

_AT_ONCE = 8  # images for which the intermediate results stay within a processor's cache


@dataclass(frozen=True)
class DrawnFeatures:
    """Responses of patch dictionaries and of a network, whitened by those of drawn pictures.

    Dictionaries, thresholds, mean and covariance come from `draw_pictures` only: the fit takes no records,
    so it costs no privacy. It is made at the first call and takes minutes. The network was fitted on such
    drawings, too, and comes with the package.

    Attributes:
        shape: ``(c, h, w)`` of the images, standardised one by one.
        dictionaries: of each the number of patches, their width, and over how many rows and columns of
            cells the responses are averaged.
        pictures: how many are drawn.
        ridge: of the whitening.
        seed: public; of drawings and dictionaries.
        with_mirror_image: whether an image's features are averaged with those of its mirror image.
        upright: whether images and drawings are set upright first, each by itself (`set_upright`).
        network: the name of the weights of a `ContrastiveNet`; None for none.
        by_views: whether they are whitened by how two views of a drawing differ, in place of how drawings
            do. What moving, turning, lighting or blurring a picture changes says little of what it shows, so
            it becomes small beside the rest (within-class covariance normalisation of A. O. Hatch, S.
            Kajarekar, A. Stolcke, Interspeech 2006, each drawing a class of its own). Half of the drawings
            are used.

    >>> features = DrawnFeatures((1, 8, 8), dictionaries=((16, 3, 4),), pictures=64)
    >>> features(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 256])
    """

    shape: tuple[int, int, int]
    dictionaries: tuple[tuple[int, int, int], ...] = ((512, 7, 2),)
    pictures: int = 20_000
    ridge: float = 0.03
    seed: int = 0
    with_mirror_image: bool = False
    upright: bool = False
    network: str | None = None
    by_views: bool = False

    def __post_init__(self) -> None:
        if self.network is not None and self.shape[0] not in ContrastiveNet.channels:
            raise ValueError(
                f"shape={self.shape}: the network {self.network!r} was fitted for grey (1) and colour (3) "
                "images. For others take features without it, such as `--features things`."
            )

    chunk = 1024  # a large factor is read for every call: few calls

    def __call__(self, inputs: Tensor) -> Tensor:
        """Features ``[n, d]`` of images ``[n, c, h, w]``; row i depends on image i only, bit for bit."""
        with torch.no_grad():
            return self._whitening(self._raw(self._prepared(inputs.float())))

    def config(self) -> dict[str, object]:
        """Name, version and constants."""
        later = ("network", "by_views")  # left out if unused, so that older caches keep their names
        constants = {name: value for name, value in asdict(self).items() if name not in later or value}
        return {"extractor": "drawn", "version": 2, **constants}

    @cached_property
    def _drawings(self) -> Tensor:
        return self._prepared(draw_pictures(self.pictures, self.shape, seed=self.seed))

    @cached_property
    def _dictionaries(self) -> list[PatchDictionary]:
        fit = PatchDictionary.fit
        return [
            fit(self._drawings, atoms=atoms, width=width, cells=cells, seed=self.seed)
            for atoms, width, cells in self.dictionaries
        ]

    @cached_property
    def _net(self) -> ContrastiveNet | None:
        return None if self.network is None else ContrastiveNet.packaged(self.network, self.shape[0])

    @cached_property
    def _whitening(self) -> Whitening:
        if self.by_views:
            fitted = self._whitening_by_views()
        else:
            chunks = torch.split(self._drawings, self.chunk)
            fitted = Whitening.fit((self._raw(chunk) for chunk in chunks), ridge=self.ridge)
        del self.__dict__["_drawings"]  # they are not needed again
        return fitted

    def _whitening_by_views(self) -> Whitening:
        drawings, generator = self._drawings[: self.pictures // 2], torch.Generator().manual_seed(self.seed)
        mean = torch.zeros(())

        def differences() -> Iterator[Tensor]:
            nonlocal mean
            for chunk in torch.split(drawings, self.chunk):
                one, other = (self._raw(self._prepared(random_views(chunk, generator))) for _ in range(2))
                mean = mean + (one + other).sum(0) / (2 * len(drawings))
                yield (one - other) / math.sqrt(2)

        return replace(Whitening.fit(differences(), ridge=self.ridge), mean=mean)

    def _prepared(self, images: Tensor) -> Tensor:
        return set_upright(images) if self.upright else images

    def _raw(self, images: Tensor) -> Tensor:
        return torch.cat([self._part(part) for part in torch.split(images, _AT_ONCE)])

    def _part(self, images: Tensor) -> Tensor:
        # a single image is convolved by other code than several, which rounds otherwise
        filled = F.pad(images, (0, 0) * 3 + (0, _AT_ONCE - len(images)))
        features = self._of(filled)
        if self.with_mirror_image:
            features = (features + self._of(filled.flip(-1))) / 2
        return features[: len(images)]

    def _of(self, images: Tensor) -> Tensor:
        parts = [dictionary(images).flatten(1) for dictionary in self._dictionaries]
        return torch.cat(parts if self._net is None else [*parts, self._net(images)], 1)

"""Features that are fitted on pictures which the library draws itself: responses of patches, whitened."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from equipoise.data.features.drawings import draw_pictures
from equipoise.data.features.patches import PatchDictionary
from equipoise.data.features.upright import set_upright
from equipoise.data.features.whitening import Whitening

__all__ = ["DrawnFeatures"]

_AT_ONCE = 8  # images for which the intermediate results stay within a processor's cache


@dataclass(frozen=True)
class DrawnFeatures:
    """Responses of patch dictionaries, whitened by those of drawn pictures.

    Dictionaries, thresholds, mean and covariance come from `draw_pictures` only: the fit takes no records,
    so it costs no privacy. It is made at the first call and takes about a minute.

    Attributes:
        shape: ``(c, h, w)`` of the images, standardised one by one.
        dictionaries: of each the number of patches, their width, and over how many rows and columns of
            cells the responses are averaged.
        pictures: how many are drawn.
        ridge: of the whitening.
        seed: public; of drawings and dictionaries.
        with_mirror_image: whether an image's features are averaged with those of its mirror image.
        upright: whether images and drawings are set upright first, each by itself (`set_upright`).

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

    chunk = 1024  # a large factor is read for every call: few calls

    def __call__(self, inputs: Tensor) -> Tensor:
        """Features ``[n, d]`` of images ``[n, c, h, w]``; row i depends on image i only, bit for bit."""
        if tuple(inputs.shape[1:]) != self.shape:
            raise ValueError(
                f"inputs has shape {list(inputs.shape)}; these features are of images {list(self.shape)}."
            )
        with torch.no_grad():
            return self._whitening(self._raw(self._prepared(inputs.float())))

    def config(self) -> dict[str, object]:
        """Name, version and constants."""
        return {"extractor": "drawn", "version": 2, **asdict(self)}

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
    def _whitening(self) -> Whitening:
        chunks = torch.split(self._drawings, self.chunk)
        fitted = Whitening.fit((self._raw(chunk) for chunk in chunks), ridge=self.ridge)
        del self.__dict__["_drawings"]  # they are not needed again
        return fitted

    def _prepared(self, images: Tensor) -> Tensor:
        return set_upright(images) if self.upright else images

    def _raw(self, images: Tensor) -> Tensor:
        return torch.cat([self._part(part) for part in torch.split(images, _AT_ONCE)])

    def _part(self, images: Tensor) -> Tensor:
        if self.with_mirror_image:
            return (self._of(images) + self._of(images.flip(-1))) / 2
        return self._of(images)

    def _of(self, images: Tensor) -> Tensor:
        return torch.cat([dictionary(images).flatten(1) for dictionary in self._dictionaries], 1)

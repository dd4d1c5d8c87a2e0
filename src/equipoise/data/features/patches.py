"""A dictionary of patches and what it says of an image: a layer of features without labels.

After A. Coates, A. Y. Ng, "The importance of encoding versus training with sparse coding and vector
quantization", ICML 2011: patches are brought to equal brightness and contrast, whitened, and compared with a
dictionary of such patches by a soft threshold. Their dictionary, whitening and thresholds come from the
training images; here all three come from pictures given by the caller, which are public.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PatchDictionary:
    """Filters with thresholds; features are the square roots of pooled responses above the threshold.

    Attributes:
        filters: ``[a, c, k, k]``: whitening and dictionary in one.
        offsets: ``[a]``, added to the responses: the whitening's mean and the thresholds.
        floor: added to a patch's variance, so that flat patches stay small.
        cells: the responses are averaged over this many rows and columns of cells.
    """

    filters: Tensor
    offsets: Tensor
    floor: float
    cells: int

    @staticmethod
    def fit(
        pictures: Tensor,
        *,
        atoms: int = 256,
        width: int = 5,
        cells: int = 4,
        floor: float = 0.1,
        ridge: float = 0.1,
        active: float = 0.15,
        seed: int = 0,
    ) -> PatchDictionary:
        """The dictionary of random patches of ``pictures``.

        Args:
            pictures: public images ``[n, c, h, w]``, at least as many as atoms.
            atoms: patches in the dictionary.
            width: of a patch.
            cells: see the class.
            floor: see the class.
            ridge: added to the eigenvalues of the patches' covariance, as a share of their mean.
            active: share of patches whose response exceeds an atom's threshold.
            seed: public; which patches are taken.
        """
        generator = torch.Generator().manual_seed(seed)
        patches = _random_patches(pictures, width, max(100_000, 4 * atoms), generator)
        patches = patches - patches.mean(1, keepdim=True)
        variance = patches.square().mean(1, keepdim=True)
        normalised = (patches / (variance + floor).sqrt()).double()
        mean = normalised.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(normalised.T))
        whitening = (vectors / (values + ridge * values.mean()).sqrt()) @ vectors.T
        whitened = (normalised - mean) @ whitening
        # flat patches say nothing: the dictionary is drawn from the half with more contrast
        rich = variance.flatten().argsort(descending=True)[: len(patches) // 2]
        taken = rich[torch.randperm(len(rich), generator=generator)[:atoms]]
        dictionary = F.normalize(whitened[taken], dim=1)
        responses = whitened[:10_000] @ dictionary.T
        thresholds = responses.quantile(1 - active, dim=0)
        filters = dictionary @ whitening
        offsets = -(filters @ mean) - thresholds
        filters = filters - filters.mean(1, keepdim=True)  # the patch's own mean is taken off by the filters
        shape = (atoms, pictures.shape[1], width, width)
        return PatchDictionary(filters.float().reshape(shape), offsets.float(), floor, cells)

    def __call__(self, images: Tensor) -> Tensor:
        """Features ``[n, a, cells, cells]`` of images ``[n, c, h, w]``; row i depends only on image i."""
        width = self.filters.shape[-1]
        padded = F.pad(images, (width // 2,) * 4, mode="replicate")
        moments = torch.cat([padded.mean(1, keepdim=True), padded.square().mean(1, keepdim=True)], 1)
        mean, square = F.avg_pool2d(moments, width, stride=1).chunk(2, 1)
        deviation = ((square - mean.square()).clamp(min=0) + self.floor).sqrt()
        responses = F.conv2d(padded, self.filters).div_(deviation).add_(self.offsets[:, None, None])
        return F.adaptive_avg_pool2d(responses.relu_(), self.cells).sqrt_()


def _random_patches(pictures: Tensor, width: int, count: int, generator: torch.Generator) -> Tensor:
    """Flat patches ``[count, c k k]`` at random places of random pictures."""
    n, _, h, w = pictures.shape
    which = torch.randint(n, (count,), generator=generator)
    rows = torch.randint(h - width + 1, (count, 1, 1), generator=generator) + torch.arange(width)[:, None]
    columns = torch.randint(w - width + 1, (count, 1, 1), generator=generator) + torch.arange(width)
    return pictures[which[:, None, None], :, rows, columns].permute(0, 3, 1, 2).flatten(1)

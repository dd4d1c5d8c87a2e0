"""A public preconditioner for a small convolutional network, by Kronecker factors from noise pictures.

    python benchmarks/public_preconditioner.py --data mnist --folder DATA --rates 1 4 16
    python benchmarks/public_preconditioner.py --data mnist --folder DATA --sides inputs --rates 0.25 1 4

No private record is read for it: factors are second moments of each layer's inputs and of the gradients of
its outputs, on pink noise with random labels (after DP-KFC, arXiv 2605.13418). A weight W is trained as V
with W = G V A, so that DP-SGD clips and noises gradients that are multiplied by the roots on both sides.
20,000 training records, 200 steps of 512, clip norm 1, epsilon 1 at delta 1e-5; accuracy on 5,000 other
training records.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import equipoise as eq
from benchmarks.trained_contenders import accuracy, train

RECORDS, STEPS, SIZE, DAMPING = 20_000, 200, 512, 0.1


class TwoSided(nn.Module):
    """W = G V A."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self.register_buffer("inputs", inputs)
        self.register_buffer("outputs", outputs)

    def forward(self, weight: Tensor) -> Tensor:
        return (self.outputs @ weight.flatten(1) @ self.inputs).view_as(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return (torch.linalg.solve(self.outputs, weight.flatten(1)) @ torch.linalg.inv(self.inputs)).view_as(
            weight
        )


def root(rows: Tensor) -> Tensor:
    """(M + d I)^(-1/2) of the rows' second moment, which leaves an average row as long as it was."""
    values, vectors = torch.linalg.eigh((rows.T @ rows / len(rows)).double())
    values = values.clamp(min=0)
    half = (values + DAMPING * values.mean()).rsqrt()
    half = half * (values.sum() / (half.square() * values).sum()).sqrt()
    return ((vectors * half) @ vectors.T).float()


def pink_noise(count: int, generator: torch.Generator) -> Tensor:
    """Pictures of 28 x 28 whose amplitudes fall with the frequency, each of mean 0 and deviation 1."""
    frequency = torch.fft.fftfreq(28)
    radius = (frequency[:, None].square() + frequency.square()).sqrt()
    radius[0, 0] = 1 / 28
    spectrum = torch.view_as_complex(torch.randn(count, 1, 28, 28, 2, generator=generator)) / radius
    pictures = torch.fft.ifft2(spectrum).real
    return (pictures - pictures.mean((2, 3), keepdim=True)) / pictures.std((2, 3), keepdim=True)


def precondition(model: nn.Module, sides: str) -> None:
    """Have every weight trained between its roots."""
    generator, kept, layers = torch.Generator().manual_seed(1), {}, []
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layers.append((layer, layer.register_forward_hook(lambda m, x, y: kept.update({m: (x[0], y)}))))
    outputs = model(pink_noise(500, generator))
    labels = torch.randint(10, (500,), generator=generator)
    losses = F.cross_entropy(outputs, labels, reduction="sum")
    gradients = torch.autograd.grad(losses, [kept[layer][1] for layer, _ in layers])
    for (layer, hook), gradient in zip(layers, gradients, strict=True):
        hook.remove()
        inputs = kept[layer][0].detach()
        if isinstance(layer, nn.Conv2d):
            inputs = F.unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride).mT
            gradient = gradient.flatten(2).mT
        left = root(gradient.flatten(0, -2)) if sides == "both" else torch.eye(gradient.shape[-1])
        parametrize.register_parametrization(
            layer, "weight", TwoSided(root(inputs.flatten(0, -2)), left), unsafe=True
        )


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    pool = nn.MaxPool2d(2, 1)
    body = [
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        pool,
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
    ]
    return nn.Sequential(*body, pool, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("mnist", "fashion-mnist"), default="mnist")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--sides", choices=("none", "inputs", "both"), default="none")
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = eq.data.load(given.data, given.folder)
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    records, judges = found.train[order[:RECORDS]], found.train[order[55_000:]]
    for rate in given.rates:
        model, began = network(given.seed), time.process_time()
        if given.sides != "none":
            precondition(model, given.sides)
        sampling = eq.Poisson(SIZE, RECORDS, STEPS)
        train(model, records, sampling, eq.DPSGD(clip_norm=1.0), 1.0, rate=rate, seed=given.seed)
        seconds = time.process_time() - began
        print(
            f"{given.data}, {given.sides}, rate {rate:g}: {accuracy(model, judges):.2f}, {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()

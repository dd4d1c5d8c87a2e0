"""One picture per method: its path through a plane, and how far from the answer it is after each step.

The model is a point w of the plane, the 500 records a_i lie in the same plane, and the loss is
||w - a_i||^2 / 2. So a record's gradient leads from the record to the model, and the best model is the mean
of the records. A fifth of the records lies apart: clipping weighs it down and moves the point of rest. The 40
public records are like the private ones, and stand a little aside.

Of a method that looks at inputs the model is linear and its weight is the point w. The records are inputs x_i
with targets near x_i b, for the same best point b, and long in one direction.

Trainings are those of `harness.follow`, with noise from a public seed. `python -m reproduction pictures NAME`
draws the picture of a method into `docs/figures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.methods import (
    DPMF,
    DPSGD,
    DPZO,
    EFSGD,
    GEP,
    PCDPSGD,
    PDPSGD,
    AdaClip,
    BiasedGEP,
    ClipSGD,
    DiSK,
    Doppler,
    DPAdamBC,
    FittedRate,
    JointWhitening,
    Method,
    PlainSGD,
    PublicOnly,
    PublicRecords,
    PublicSubspace,
    PublicWarmStart,
    RandomProjection,
    RandomSparsification,
    RandomSubspace,
    ScaleThenPrivatise,
)
from equipoise.privacy import Budget, Poisson
from equipoise.report.figures import COLOURS
from reproduction.figures import Curve
from reproduction.harness import Problem, follow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "Picture", "picture"]

START = (-2.0, 3.0)
RATE = 0.1


class Plane(nn.Module):
    """A model that is a point: its output is w for every record."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.point.weight.copy_(torch.tensor(START)[:, None])

    def forward(self, ones: Tensor) -> Tensor:
        """The point, once per record."""
        return self.point(ones)


def _records(near: int, far: int, shift: tuple[float, float], seed: int) -> Tensor:
    """Two heaps of records, [near + far, 2]."""
    chance = torch.Generator().manual_seed(seed)
    places = torch.tensor([[0.0, 0.0]] * near + [[4.0, 3.0]] * far) + torch.tensor(shift)
    return places + torch.randn(near + far, 2, generator=chance) * torch.tensor([0.5, 0.3])


def _batch(records: Tensor) -> dict[str, Tensor]:
    return {"one": torch.ones(len(records), 1), "place": records}


PRIVATE = _records(400, 100, (0.0, 0.0), seed=1)
PUBLIC = _records(32, 8, (0.3, -0.5), seed=2)


class Weight(nn.Module):
    """A linear model: its output is w x."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.point.weight.copy_(torch.tensor(START)[None])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.point(inputs).squeeze(1)


def _stretched() -> dict[str, Tensor]:
    """Inputs with a deviation of 1 along (1, 1) and of 0.2 across, and their targets."""
    chance = torch.Generator().manual_seed(3)
    parts = torch.randn(len(PRIVATE), 3, generator=chance) * torch.tensor([1.0, 0.2, 0.1])
    inputs = parts[:, :2] @ torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / math.sqrt(2)
    return {"input": inputs, "target": inputs @ PRIVATE.mean(0) + parts[:, 2]}


INPUTS = _stretched()


@dataclass(frozen=True)
class Picture:
    """What is drawn for a method.

    Attributes:
        methods: by the words of the legend; the method of the page first.
        epsilon: of every private training, at delta = 1e-5.
        steps: of every training.
        paths: seeds whose paths are drawn; the distances are those of five seeds.
        public: whether the public records are drawn.
        inputs: whether the model is linear and the records are inputs.
    """

    methods: Mapping[str, Method]
    epsilon: float = 4.0
    steps: int = 100
    paths: int = 1
    public: bool = False
    inputs: bool = False


def _pictures() -> dict[str, Picture]:
    public = PublicRecords(_batch(PUBLIC))
    line = PublicSubspace(public, dimension=1)
    dp_sgd = {"dp-sgd": DPSGD(clip_norm=4.0)}
    return {
        "dp-sgd": Picture(
            {
                "clip norm 0.5": DPSGD(clip_norm=0.5),
                "clip norm 8": DPSGD(clip_norm=8.0),
                "no clipping, no noise": ClipSGD(clip_norm=math.inf),
            },
            epsilon=1.0,
        ),
        "sgd": Picture({"sgd": PlainSGD(), **dp_sgd}),
        "clip-sgd": Picture(
            {f"clip norm {word}": ClipSGD(clip_norm=value) for word, value in [("0.5", 0.5), ("2", 2.0)]}
            | {"no clipping": ClipSGD(clip_norm=math.inf)},
        ),
        "ef-sgd": Picture({"ef-sgd": EFSGD(clip_norm=0.5), "clip-sgd": ClipSGD(clip_norm=0.5)}, steps=300),
        "biased-gep": Picture(
            {"biased-gep, one direction": BiasedGEP(source=line, clip_norm=4.0), **dp_sgd}, public=True
        ),
        "gep": Picture(
            {
                "gep, one direction": GEP(source=line, clip_norm=4.0),
                "biased-gep": BiasedGEP(source=line, clip_norm=4.0),
                **dp_sgd,
            },
            public=True,
        ),
        "pdp": Picture(
            {
                "pdp, one direction": PDPSGD(source=line, clip_norm=0.5),
                "pcdp-sgd": PCDPSGD(source=line, clip_norm=0.5),
                "dp-sgd": DPSGD(clip_norm=0.5),
            },
            public=True,
        ),
        "rpdp": Picture(
            {
                "rpdp, one direction per epoch": RandomProjection(
                    source=RandomSubspace(dimension=1), clip_norm=4.0
                ),
                **dp_sgd,
            },
            paths=3,
        ),
        "dp-mf": Picture(
            {"dp-mf, noise over 4 steps": DPMF(clip_norm=4.0, bands=4), **dp_sgd}, epsilon=8.0, paths=3
        ),
        "dp-zo": Picture({"dp-zo": DPZO(clip_norm=4.0), **dp_sgd}, paths=3),
        "scale-then-privatise": Picture(
            {"scale-then-privatise": ScaleThenPrivatise(clip_norm=4.0), **dp_sgd}, paths=3
        ),
        "joint-whitening": Picture(
            {"joint-whitening": JointWhitening(clip_norm=1.0), "dp-sgd": DPSGD(clip_norm=1.0)},
            paths=3,
            inputs=True,
        ),
        "adaclip": Picture({"adaclip": AdaClip(clip_norm=4.0), **dp_sgd}, paths=3),
        # A rate of 0.1 moves each entry by 0.1 per step, whatever the gradient's size.
        "dp-adam-bc": Picture({"dp-adam-bc": DPAdamBC(clip_norm=4.0), **dp_sgd}, paths=3),
        "fitted-rate": Picture({"fitted-rate": FittedRate(), **dp_sgd}, paths=3),
        "disk": Picture({"disk": DiSK(clip_norm=4.0), **dp_sgd}, epsilon=1.0, paths=3),
        "doppler": Picture({"doppler": Doppler(clip_norm=4.0), **dp_sgd}, epsilon=1.0, paths=3),
        "rsdp": Picture(
            {"rsdp, half of the coordinates": RandomSparsification(drop_rate=0.5, clip_norm=4.0), **dp_sgd}
        ),
        "public-only": Picture({"public-only": PublicOnly(public=public), **dp_sgd}, public=True),
        "public-warm-start": Picture(
            {
                "public-warm-start": PublicWarmStart(
                    public=public, inner=DPSGD(clip_norm=4.0), warm_steps=50
                ),
                **dp_sgd,
            },
            epsilon=0.5,
            public=True,
        ),
    }


PICTURES = _pictures()


def picture(name: str) -> tuple[Figure, dict[str, tuple[float, float, float]]]:
    """Train the methods of a picture, five seeds each, and draw them.

    Returns:
        The figure, and per method the median, the smallest and the largest distance at the end.
    """
    from matplotlib.figure import Figure

    chosen, best = PICTURES[name], PRIVATE.mean(0)
    figure = Figure(figsize=(6.2, 3.3), layout="constrained")
    plane, distance = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_plane(plane, chosen, best)
    ends = {}
    for number, (label, method) in enumerate(chosen.methods.items()):
        colour, above = COLOURS[number], 3 - 0.1 * number  # the method of the page is on top
        paths = [_path(method, chosen, seed) for seed in range(5)]
        for path in paths[: chosen.paths]:
            plane.plot(*path.T, color=colour, linewidth=1.3, zorder=above)
            plane.plot(*path[-1], "o", color=colour, markersize=6, markeredgecolor="white", zorder=above + 1)
        runs = [dict(enumerate((path - best).norm(dim=1).tolist())) for path in paths]
        curve = Curve.of_seeds(label, runs)
        ends[label] = (curve.y[-1], curve.low[-1], curve.high[-1])
        distance.plot(curve.x, curve.y, color=colour, label=label, linewidth=1.6, zorder=above)
        distance.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.14, linewidth=0)
    plane.set_title(f"path of the model ({'one seed' if chosen.paths == 1 else 'three seeds'})", fontsize=10)
    distance.set_title("distance to the best (five seeds)", fontsize=10)
    distance.set_xlabel("steps", fontsize=9)
    distance.set_yscale("log")
    distance.set_ylim(0.01, 5)
    distance.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    distance.grid(True, color="#00000014", linewidth=0.6)
    for axes in (plane, distance):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *distance.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure, ends


def _draw_plane(axes: Axes, chosen: Picture, best: Tensor) -> None:
    """The records, the start and the best point."""
    records, word = (INPUTS["input"], "inputs") if chosen.inputs else (PRIVATE, "records")
    axes.plot(*records.T, "o", color="#9aa4ad", markersize=2, markeredgewidth=0)
    axes.text(4, 1.7, word, color="#5b6770", fontsize=9, ha="center")
    if chosen.public:
        axes.plot(*PUBLIC.T, "^", color="#b23a8e", markersize=4, markeredgewidth=0)
        axes.text(4, 1.2, "public records", color="#b23a8e", fontsize=9, ha="center")
    white = {"boxstyle": "round,pad=0.1", "facecolor": "white", "alpha": 0.8, "edgecolor": "none"}
    for place, marker, word, offset in [
        (START, "s", "start", (7, 2)),
        ((float(best[0]), float(best[1])), "x", "best", (9, -4)),
    ]:
        axes.plot(*place, marker, color="black", markersize=6, markeredgewidth=2, zorder=5)
        axes.annotate(word, place, offset, textcoords="offset points", fontsize=9, bbox=white, zorder=5)
    axes.set_aspect("equal", anchor="N")
    axes.set(xlim=(-2.5, 5.7), ylim=(-1.3, 4.2), xticks=[-2, 0, 2, 4], yticks=[0, 2, 4])


def _path(method: Method, chosen: Picture, seed: int) -> Tensor:
    """The model at the start and after every step, [steps + 1, 2]."""
    places: list[Tensor] = []

    def note(model: nn.Module) -> float:
        places.append(model.get_parameter("point.weight").detach().flatten().clone())
        return 0.0

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (model(batch["one"]) - batch["place"]).square().sum(1)

    def loss_of_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * (model(batch["input"]) - batch["target"]).square()

    problem = (
        Problem("inputs", Weight, loss_of_inputs, INPUTS, len(PRIVATE), note)
        if chosen.inputs
        else Problem("plane", Plane, loss, _batch(PRIVATE), len(PRIVATE), note)
    )
    follow(
        method,
        problem,
        sampling=Poisson(100, len(PRIVATE), chosen.steps),
        budget=Budget(chosen.epsilon, 1e-5),
        learning_rate=RATE,
        seed=seed,
        measure_at=range(chosen.steps + 1),
    )
    return torch.stack(places)

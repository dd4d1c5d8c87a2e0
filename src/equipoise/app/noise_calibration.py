"""From noise to epsilon and back, for one setting or for a table of them: what `equipoise calibrate` answers.

The plan is one clipped sum per step, which is DP-SGD's; nothing here needs data.
"""

from __future__ import annotations

from typing import Any

from equipoise.app.settings import MOST_STEPS, CalibrationSettings, steps_of
from equipoise.privacy import RECORD, Budget, Gaussian, PrivacyPlan, Release, Unit, calibrate, epsilon
from equipoise.privacy.sampling import SAMPLING_WORDS


def _plan(asked: CalibrationSettings, noise_multiplier: float, batch_size: float, steps: int) -> PrivacyPlan:
    sampling = SAMPLING_WORDS[asked.sampling].of_size(batch_size, asked.population, steps)
    return PrivacyPlan(
        [Release("gradient", 1.0, Gaussian(noise_multiplier))], sampling, asked.relation, unit=_unit(asked)
    )


def _steps(asked: CalibrationSettings, epochs: float, batch_size: float, most: int = MOST_STEPS) -> int:
    """The steps of so many epochs; where an epoch is a whole number of draws, these decide."""
    return steps_of(epochs, asked.population, _draw_size(asked, batch_size), most)


def _draw_size(asked: CalibrationSettings, batch_size: float) -> float:
    return SAMPLING_WORDS[asked.sampling].of_size(batch_size, asked.population, 1).expected_size


def _unit(asked: CalibrationSettings) -> Unit:
    return RECORD if asked.records_per_user == 1 else Unit("user", asked.records_per_user)


def answer(asked: CalibrationSettings) -> dict[str, Any]:
    """Epsilon and noise multiplier, with how they were found, as plain values.

    >>> asked = CalibrationSettings(population=60_000, batch_size=256, steps=4700, noise_multiplier=1.0)
    >>> round(answer(asked)["epsilon"], 3)
    1.571
    """
    size = asked.batch_size, asked.steps or _steps(asked, asked.epochs or 0.0, asked.batch_size)
    if asked.epsilon is None:
        assert asked.noise_multiplier is not None
        plan = _plan(asked, asked.noise_multiplier, *size)
    else:
        plan = calibrate(lambda scale: _plan(asked, scale, *size), Budget(asked.epsilon, asked.delta))
    noise = plan.releases[0].noise_multiplier
    found = plan.epsilon(asked.delta)
    return {
        "epsilon": found.value,
        "delta": asked.delta,
        "noise_multiplier": noise,
        "accountant": found.accountant,
        "cross_check_rdp": found.cross_check,
        "relation": asked.relation,
        "unit": _unit(asked).name,
        "users": _unit(asked).describe(),
        "sampling": plan.sampling.describe(),
        "sampling_rate": plan.sampling.sampling_rate,
        "steps": plan.sampling.steps,
        "epochs": plan.sampling.steps * plan.sampling.expected_size / asked.population,
        "population": asked.population,
        "noise_of_the_mean": noise / plan.sampling.expected_size,
    }


def table(asked: CalibrationSettings, noise: float) -> tuple[list[float], list[float], list[list[float]]]:
    """What this noise costs in a few numbers of epochs and batch sizes around the asked ones, quickly.

    The coarse accountant used here errs on the safe side, by a few per cent at most.

    Returns:
        (epochs [R], batch sizes [C], epsilon [R][C]).
    """
    size, population = asked.batch_size, asked.population
    steps = asked.steps or _steps(asked, asked.epochs or 0.0, size)
    epochs = steps * _draw_size(asked, size) / population
    rows = [epochs * factor for factor in (0.5, 1, 2)]
    # The asked size stands as it is; its neighbours are whole numbers where they hold at least one record.
    sizes = [size * 0.25 if size < 4 else float(round(size * 0.25)), size, float(round(size * 4))]
    whole = "batch_size" in SAMPLING_WORDS[asked.sampling].of_size(1, population, 1).describe()
    columns = [size for size in sizes if size <= population and (size.is_integer() or not whole)]

    def spent(epochs: float, batch_size: float) -> float:
        steps = _steps(asked, epochs, batch_size, most=10 * MOST_STEPS)  # 8 times those asked for
        event = _plan(asked, noise, batch_size, steps).event()
        return epsilon(event, asked.delta, asked.relation, cross_check=False).value

    return rows, columns, [[spent(row, column) for column in columns] for row in rows]

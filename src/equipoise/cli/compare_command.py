"""``equipoise compare``: methods at one budget."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.app.contenders import Comparison
from equipoise.app.option_checks import check_data_and_model
from equipoise.app.settings import OF_OWN_DATA, RunSettings
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.settings_options import option_file, settings_options
from equipoise.cli.shared_options import Json, RunDir, UsageError

__all__ = ["compare"]


@option_file
@settings_options(
    RunSettings,
    "data", "data_dir", *OF_OWN_DATA, "subset", "public_records", "model", "epsilon", "delta", "epochs",
    "batch_size", "learning_rate", "clip_norm", "optimizer", "momentum", "schedule", "ema",
    "micro_batch_size", "device", "reproducible", "unit", "owner", "records_per_user", "user_rows",
    parameter="base",
    helps={
        "epsilon": "Privacy budget of every run.",
        "learning_rate": "Centre of the rates that are tried.",
        "public_records": "Declare the last so many training records public, for all methods.",
        "reproducible": "Noise follows the seeds: NOT PRIVATE.",
    },
)  # fmt: skip
def compare(
    base: RunSettings,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; LABEL=METHOD for a second form of one.")
    ] = "dp-sgd, auto-s, quantile-clipping",
    seeds: Annotated[int, typer.Option(help="Runs that are reported, per method.")] = 3,
    trials: Annotated[int, typer.Option(help="Learning rates tried, per method.")] = 3,
    learning_rates: Annotated[
        str | None, typer.Option(help="The rates to try with every method, such as 0.5,1,2.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting of one method, such as dp-sgd.clip_norm=0.1; repeatable.",
            metavar="METHOD.NAME=VALUE",
        ),
    ] = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Compare methods at one budget over several seeds; goes on where it was stopped."""
    check_data_and_model(base.data, base.model)
    comparison = Comparison(
        methods,
        base,
        option or (),
        seeds=seeds,
        trials=trials,
        learning_rates=_rates(learning_rates, trials),
    )
    with loading():
        from equipoise.app.compare import run_comparison

    quiet()
    console = open_console(json_output)
    found = run_comparison(comparison, run_dir or f"runs/compare-{base.data_name.replace(':', '-')}", console)
    if json_output:
        emit(found)
        return
    from equipoise.report.comparison_page import comparison_table

    console.print(comparison_table(found))
    console.print(f"\n{found['page']}", markup=False, soft_wrap=True)


def _rates(text: str | None, trials: int) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--learning-rates is {text!r}, but it must be numbers such as 0.5,1,2.") from None
    if len(rates) != trials:
        raise UsageError(
            f"--learning-rates is {text!r}, but --trials is {trials}: give that many numbers above 0."
        )
    return rates

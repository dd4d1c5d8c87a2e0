"""``equipoise compare``: methods at one budget."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.screen import emit, open_console, quiet
from equipoise.cli.words import DataDir, Device, Json, RunDir, UsageError

__all__ = ["compare"]


def compare(
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; LABEL=METHOD for a second form of one.")
    ] = "dp-sgd,auto-s,quantile-clipping",
    data: Annotated[str, typer.Option(help="Name of a data set, or package.module:function.")] = "digits",
    data_dir: DataDir = None,
    population: Annotated[
        int | None, typer.Option(help="Public number of training records (own data only).")
    ] = None,
    subset: Annotated[int | None, typer.Option(help="Use the first so many training records alone.")] = None,
    public_records: Annotated[
        int | None, typer.Option(help="Declare the last so many training records public, for all methods.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of a model, or package.module:function.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of every run.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability of the guarantee.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs that are reported, a method.")] = 3,
    trials: Annotated[int, typer.Option(help="Learning rates tried, a method.")] = 3,
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
    epochs: Annotated[float | None, typer.Option(help="Expected passes over the data.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected number of records a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Centre of the rates that are tried.")] = None,
    clip_norm: Annotated[str | None, typer.Option(help="Bound on one record's gradient.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Learning rate: constant, linear or cosine.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of averaged weights; 0 for none.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Records held in memory at once.")] = None,
    device: Device = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Noise follows the seeds: NOT PRIVATE.")
    ] = False,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Compare methods at one budget over several seeds; goes on where it was stopped."""
    from equipoise.app.compare import Comparison, parse_method_option, read_entries, run_comparison
    from equipoise.app.settings import Settings

    quiet()
    base = Settings(
        data=data,
        data_dir=data_dir,
        population=population,
        subset=subset,
        public_records=public_records,
        model=model,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        optimizer=optimizer,
        momentum=momentum,
        schedule=schedule,
        ema=ema,
        micro_batch_size=micro_batch_size,
        device=device,
        reproducible=reproducible,
    )
    comparison = Comparison(
        read_entries(methods, [parse_method_option(text) for text in option or []]),
        base,
        seeds=seeds,
        trials=trials,
        learning_rates=_rates(learning_rates, trials),
    )
    console = open_console(json_output)
    found = run_comparison(comparison, run_dir or f"runs/compare-{data.replace(':', '-')}", console)
    if json_output:
        emit(found)
        return
    from equipoise.report.comparison import comparison_table

    console.print(comparison_table(found))
    console.print(f"\n{found['page']}", markup=False, soft_wrap=True)


def _rates(text: str | None, trials: int) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--learning-rates is {text!r}, but it must be numbers such as 0.5,1,2.") from None
    if len(rates) != trials or not all(rate > 0 for rate in rates):
        raise UsageError(
            f"--learning-rates is {text!r}, but --trials is {trials}: give that many numbers above 0."
        )
    return rates

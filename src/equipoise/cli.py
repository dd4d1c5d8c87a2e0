"""The command line: a thin face over the rooms of the library.

Every command takes ``--json`` (one object on standard output, nothing else there) and ``--run-dir``. What is
meant for people goes to standard output without ``--json`` and to standard error with it. A value that cannot
be used gives a message in prose and exit code 2; an interrupted training gives 130; a fault of the library
itself keeps its traceback, which is worth reporting.

torch and the rooms are imported inside the commands, so that ``--help`` is quick, and after the options were
checked, so that a slip is answered at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise import __version__

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "main"]

app = typer.Typer(
    name="equipoise",
    help="Train PyTorch models with differential privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunDir = Annotated[str | None, typer.Option("--run-dir", help="The run folder.", metavar="DIR")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="The run folder.", show_default=False)]
DataDir = Annotated[
    str | None, typer.Option(help="Folder that holds the data files.", envvar="EQUIPOISE_DATA", metavar="DIR")
]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]


class UsageError(ValueError):
    """Options that do not fit together."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    >>> main(["--version"])
    equipoise 0.1.0
    0
    """
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words
    try:
        code = app(words, standalone_mode=False, prog_name="equipoise")
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", as_json, 130)
    except Exception as error:
        if not _is_taught(error):
            raise
        return _fail(_words(error), as_json, 2)
    return int(code or 0)


def _is_taught(error: Exception) -> bool:
    """Whether an error was raised on purpose: by the parser, by this library, or by the system (a full disk).

    A TypeError out of torch, say, is a fault: it keeps its traceback.
    """
    if isinstance(error, OSError) or hasattr(error, "format_message"):
        return True
    if not isinstance(error, ValueError | RuntimeError | TypeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("equipoise")


def _words(error: Exception) -> str:
    from equipoise.experiments.options import in_option_words

    # typer's parser errors have a message of their own; their classes moved between its versions
    message = getattr(error, "format_message", None)
    if callable(message):
        return str(message())
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    named = {p.name for c in commands.values() for p in c.params if any(o.startswith("--") for o in p.opts)}
    return in_option_words(str(error), sorted(named))


def _fail(message: str, as_json: bool, code: int) -> int:
    if as_json:
        print(json.dumps({"error": message, "exit_code": code}))
    print(f"equipoise: {message}", file=sys.stderr)
    return code


def _console(as_json: bool) -> Console:
    """Where words for people go."""
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


@contextmanager
def _loading() -> Iterator[None]:
    """Say at once that something happens: PyTorch takes seconds to load. Only a person's screen shows it."""
    with _console(True).status("starting: loading PyTorch"):
        yield


def _quiet() -> None:
    """Keep off the screen what the accountants say about orders that they leave out."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)


def _emit(value: dict[str, Any]) -> None:
    # allow_nan=False: a reader of JSON must never meet the word Infinity
    print(json.dumps(value, allow_nan=False))


def _folder(run: str | None, run_dir: str | None) -> str:
    if run is not None and run_dir is not None and Path(run) != Path(run_dir):
        raise UsageError(f"the run folder was given twice: {run!r} and --run-dir {run_dir!r}. Give it once.")
    folder = run if run is not None else run_dir
    if folder is None:
        raise UsageError("the run folder is missing. Name it after the command, such as runs/digits-1.")
    return folder


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"equipoise {__version__}")
        raise typer.Exit(0)


@app.command()
def calibrate(
    population: Annotated[int, typer.Option(help="Public number of records.")],
    batch_size: Annotated[float, typer.Option(help="Expected number of records a step.")],
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected passes, instead of steps.")] = None,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee.")] = 1e-5,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise over clip norm; asks for epsilon.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target; asks for the noise multiplier.")] = None,
    sampling: Annotated[
        str, typer.Option(help="poisson, without-replacement, full-batch or unamplified.")
    ] = "poisson",
    relation: Annotated[str, typer.Option(help="add-or-remove-one or replace-one.")] = "add-or-remove-one",
    json_output: Json = False,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", help="Folder to write the answer to, as calibration.json.", metavar="DIR"),
    ] = None,
) -> None:
    """Translate between noise and epsilon; shows a table over epochs and batch sizes."""
    from equipoise.experiments.options import check_calibration

    check_calibration(
        population=population,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        sampling=sampling,
        relation=relation,
    )
    with _loading():
        from equipoise.experiments.calibration import Question, answer, table

    _quiet()
    if steps is None:
        assert epochs is not None
        steps = _steps(epochs, population, batch_size)
    question = Question(
        population=population,
        batch_size=batch_size,
        steps=steps,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        sampling=sampling,
        relation=relation.replace("-", "_"),
    )
    with _console(True).status("computing epsilon" if epsilon is None else "calibrating the noise"):
        found = answer(question)
    if run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        (Path(run_dir) / "calibration.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if json_output:
        _emit(found)
        return
    _show_calibration(found, epsilon is None, table(question, found["noise_multiplier"]))


def _steps(epochs: float, population: int, batch_size: float) -> int:
    import math

    return max(1, math.ceil(epochs * population / batch_size - 1e-9))


def _show_calibration(
    found: dict[str, Any], asked_epsilon: bool, table: tuple[list[float], list[float], list[list[float]]]
) -> None:
    from rich.table import Table

    from equipoise.report.words import plain, rounded_up, significant

    console = _console(False)
    console.print(
        f"noise multiplier [bold]{significant(found['noise_multiplier'], 4)}[/]  gives  "
        f"epsilon [bold]{rounded_up(found['epsilon'])}[/] at delta {plain(found['delta'])}  "
        f"[dim](by {found['accountant'].upper()}, {found['steps']:,} steps, "
        f"{found['relation'].replace('_', ' ')})[/]"
    )
    epochs, batch_sizes, cells = table
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("", style="dim", justify="right")
    for size in batch_sizes:
        shown.add_column(f"{size:,g}", justify="right")
    for row, values in zip(epochs, cells, strict=True):
        shown.add_row(f"{row:,.4g}", *(significant(v, 3) for v in values))
    asked = "epsilon" if asked_epsilon else "noise multiplier"
    console.print(f"\n[dim]{asked}, roughly, by batch size (across) and epochs (down)[/]")
    console.print(shown)
    if found["delta"] * found["population"] >= 1:
        console.print("\n[yellow]delta is at least 1/population: it would allow one whole record to leak.[/]")


@app.command()
def train(
    data: Annotated[str, typer.Option(help="Name of a data set, or package.module:function.")] = "digits",
    data_dir: DataDir = None,
    population: Annotated[
        int | None, typer.Option(help="Public number of training records (own data only).")
    ] = None,
    method: Annotated[str, typer.Option(help="Training method.")] = "dp-sgd",
    recipe: Annotated[
        str | None, typer.Option(help="library (default), or as_published: the paper's, holes and all.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Form of the method, where it has several.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Further argument of the method; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    subset: Annotated[int | None, typer.Option(help="Use the first so many training records alone.")] = None,
    public_records: Annotated[
        int | None, typer.Option(help="Declare the last so many training records public.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of a model, or package.module:function.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability of the guarantee.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise, instead of a budget.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected passes over the data.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected number of records a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    clip_norm: Annotated[
        str | None,
        typer.Option(
            help="Bound on one record's gradient: a number, decay:START:RATE, quantile or quantile:SHARE."
        ),
    ] = None,
    clip_rule: Annotated[str | None, typer.Option(help="abadi, auto_s, nsgd or psac.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Clip every layer on its own.")] = False,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Learning rate: constant, linear or cosine.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of averaged weights; 0 for none.")] = None,
    views: Annotated[int | None, typer.Option(help="Random views of a record, averaged.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Records held in memory at once.")] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Initial weights and other public randomness.")] = 0,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Noise follows the seed too: NOT PRIVATE.")
    ] = False,
    ledger: Annotated[
        str | None, typer.Option(help="Journal shared by runs over one data set.", metavar="FILE")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; spend nothing.")
    ] = False,
    json_output: Json = False,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", help="The run folder to make; runs/DATA-TIME by default.", metavar="DIR"),
    ] = None,
) -> None:
    """Train a model privately and write a run folder."""
    from equipoise.experiments.settings import Settings, parse_option

    settings = Settings(
        data=data,
        data_dir=data_dir,
        population=population,
        method=method,
        recipe=recipe.replace("-", "_") if recipe else None,
        variant=variant,
        options=dict(map(parse_option, option or [])),
        subset=subset,
        public_records=public_records,
        model=model,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        clip_rule=clip_rule,
        per_layer=per_layer,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        ema=ema,
        views=views,
        micro_batch_size=micro_batch_size,
        device=device,
        seed=seed,
        reproducible=reproducible,
        ledger=ledger,
        run_dir=run_dir,
    )
    settings.check()
    with _loading():
        from equipoise.experiments.run import describe_run, train_run

    _quiet()
    console = _console(json_output)
    if dry_run:
        found = describe_run(settings, console)
        if json_output:
            _emit(found)
        return
    _finish(train_run(settings, console), json_output, console)


@app.command()
def resume(
    run: RunArgument = None,
    data_dir: DataDir = None,
    device: Device = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Go on with an interrupted run."""
    from equipoise.experiments.saved import read_settings

    folder = _folder(run, run_dir)
    read_settings(folder)
    with _loading():
        from equipoise.experiments.run import resume_run

    _quiet()
    console = _console(json_output)
    _finish(resume_run(folder, console, data_dir=data_dir, device=device), json_output, console)


def _finish(found: dict[str, Any], as_json: bool, console: Console) -> None:
    """Show the end of a training: summary or JSON object; exit code 130 if somebody stopped it."""
    from equipoise.report import read_run, summary

    if as_json:
        _emit(found)
    else:
        console.print()
        console.print(summary(read_run(found["run_dir"]), found["run_dir"], found["seconds"]))
    if not found["finished"]:
        print(f"equipoise: stopped; go on with: equipoise resume {found['run_dir']}", file=sys.stderr)
        raise typer.Exit(130)


@app.command()
def report(run: RunArgument = None, json_output: Json = False, run_dir: RunDir = None) -> None:
    """Write the report of a run again, from its publishable files."""
    from equipoise.report import read_run, summary, write_report

    folder = _folder(run, run_dir)
    path = write_report(folder)
    found = read_run(folder)
    if json_output:
        _emit(
            {
                "run_dir": folder,
                "report": str(path),
                "accuracy": found.accuracy,
                "epsilon": found.epsilon,
                "delta": found.delta,
                "guarantee": found.guarantee,
                "statement": dict(found.statement),
            }
        )
        return
    console = _console(False)
    console.print(summary(found, folder))


@app.command()
def predict(
    run: RunArgument = None,
    data: Annotated[
        str | None, typer.Option(help="Data to predict for; the run's test records by default.")
    ] = None,
    data_dir: DataDir = None,
    output: Annotated[
        str | None, typer.Option(help="Write the predicted classes there, one a line.", metavar="FILE")
    ] = None,
    device: Device = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Use the model of a run on records and print its accuracy."""
    from equipoise.experiments.saved import check_model_file, read_settings

    folder = _folder(run, run_dir)
    read_settings(folder)
    check_model_file(folder)
    if output is not None and not Path(output).parent.is_dir():
        raise UsageError(
            f"--output is {output!r}, but there is no folder {str(Path(output).parent)!r}. Make it first."
        )
    with _loading():
        from equipoise.experiments.predict import predict_run

    found = predict_run(folder, data=data, data_dir=data_dir, output=output, device=device)
    if json_output:
        _emit(found)
        return
    console = _console(False)
    console.print(
        f"accuracy [bold]{found['accuracy']:.2%}[/] on {found['records']:,} test records of {found['data']}"
    )
    if output is not None:
        console.print(f"predictions in {output}")


@app.command()
def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Methods; all by default.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the training methods: what each does, proves and costs, and when it suits."""
    from dataclasses import asdict

    with _loading():
        from equipoise.methods import METHODS

    unknown = [name for name in names or [] if name not in METHODS]
    if unknown:
        raise UsageError(f"there is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    rows = [{"name": name, **asdict(METHODS[name].card)} for name in names or METHODS]
    if json_output:
        _emit({"methods": rows})
        return
    from equipoise.report.listings import methods_listing

    _console(False).print(methods_listing(rows))


@app.command()
def experiment(
    name: Annotated[str | None, typer.Argument(help="The experiment; without it they are listed.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds; each experiment has a default.")] = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Run a small experiment of a paper again: table, verdicts and figure."""
    with _loading():
        from equipoise.experiments.reproduce import list_experiments, run_experiment
    from equipoise.report.listings import experiments_listing, findings_tables

    _quiet()
    console = _console(json_output)
    if name is None:
        found = list_experiments()
        if json_output:
            _emit({"experiments": found})
        else:
            console.print(experiments_listing(found))
        return
    findings, values = run_experiment(name, console, seeds=seeds, folder=run_dir)
    if json_output:
        _emit(values)
        return
    console.print(
        f"[bold]{values['title']}[/]  [dim]{values['seeds']} seeds, {values['seconds']:,.0f} s[/]\n"
    )
    console.print(findings_tables(findings))
    console.print(f"\n[dim]{values['figure']}, findings.json beside it[/]", soft_wrap=True)


@app.command()
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
    from equipoise.experiments.compare import Comparison, parse_method_option, read_entries, run_comparison
    from equipoise.experiments.settings import Settings

    _quiet()
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
    console = _console(json_output)
    found = run_comparison(comparison, run_dir or f"runs/compare-{data.replace(':', '-')}", console)
    if json_output:
        _emit(found)
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

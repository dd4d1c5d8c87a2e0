"""``python -m reproduction``: the papers' experiments, attacks on published claims, and planted bugs.

Every experiment is a command of its own, made from the table of titles.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from equipoise.cli import run_app
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.shared_options import DataDir, Json, RunDir, UsageError
from reproduction import papers

__all__ = ["main"]

Seed = Annotated[int, typer.Option(help="Of canaries and noise.")]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    app = typer.Typer(
        help="Run the papers' experiments, attacks on published claims, and planted bugs.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Without a name all experiments are listed.",
    )
    app.callback(invoke_without_command=True)(_list)
    app.command()(attacks)
    app.command("planted-bugs")(planted_bugs)
    app.command()(pictures)
    app.command("unpack-cifar10")(unpack_cifar10)
    for name, title in papers.TITLES.items():
        app.command(name, help=title)(_experiment(name))
    return run_app(app, words, "python -m reproduction", ("equipoise", "reproduction", "__main__"))


def _list(context: typer.Context, json_output: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from reproduction.listings import experiments_listing

    if json_output:
        with loading():
            from reproduction.run import list_experiments
        emit({"experiments": list_experiments()})
        return
    console = open_console(False)
    console.print(experiments_listing(papers.TITLES))
    console.print("\n[dim]python -m reproduction NAME runs one; --json says what each compares[/]")
    console.print("[dim]python -m reproduction attacks, planted-bugs or pictures[/]")


def _experiment(name: str) -> Callable[..., None]:
    def run(
        seeds: Annotated[int | None, typer.Option(help="How many; each experiment has a default.")] = None,
        seed_offset: Annotated[int, typer.Option(help="The first seed.")] = 0,
        data_dir: DataDir = None,
        json_output: Json = False,
        run_dir: RunDir = None,
    ) -> None:
        with loading():
            from reproduction.listings import findings_tables
            from reproduction.run import run_experiment
        quiet()
        console = open_console(json_output)
        findings, values = run_experiment(
            name, console, seeds=seeds, seed_offset=seed_offset, folder=run_dir, data_dir=data_dir
        )
        if json_output:
            emit(values)
            return
        console.print(
            f"[bold]{values['title']}[/]  [dim]{values['seeds']} seeds, {values['seconds']:,.0f} s[/]\n"
        )
        console.print(findings_tables(findings))
        console.print(f"\n[dim]{values['figure']}, findings.json in the same folder[/]")

    return run


def attacks(
    name: Annotated[
        str | None, typer.Argument(help="The method whose published claim is attacked; all by default.")
    ] = None,
    seed: Seed = 0,
    json_output: Json = False,
) -> None:
    """Attack published claims. Exit code 1: an attack does not refute its claim."""
    with loading():
        from reproduction.attacks import ATTACKS
        from reproduction.listings import attacks_listing
    if name is not None and name not in ATTACKS:
        raise UsageError(f"there is no attack {name!r}. There are {', '.join(ATTACKS)}.")
    _be_quiet()
    found = []
    for chosen in ATTACKS if name is None else [name]:
        with open_console(True).status(f"attacking {chosen} as published"):
            found.append(ATTACKS[chosen](seed=seed))
    if json_output:
        emit({"attacks": [attack.to_json() for attack in found]})
    else:
        open_console(False).print(attacks_listing(found))
    if not all(attack.succeeds for attack in found):
        raise typer.Exit(1)


def planted_bugs(seed: Seed = 0, json_output: Json = False) -> None:
    """Plant bugs and look for them. Exit code 1: a check misses its bug, or sees one where there is none."""
    with loading():
        from reproduction.listings import bugs_table
        from reproduction.planted_bugs import find_planted
    _be_quiet()
    with open_console(True).status("planting bugs and looking for them"):
        rows = find_planted(seed)
    if json_output:
        emit({"planted": [row.to_json() for row in rows]})
    else:
        open_console(False).print(bugs_table(rows))
    if not all(row.found for row in rows):
        raise typer.Exit(1)


def pictures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Methods; all by default.")
    ] = None,
    folder: Annotated[str, typer.Option(help="Where NAME.png is written.", metavar="DIR")] = "docs/figures",
    json_output: Json = False,
) -> None:
    """Draw the pictures of the pages on methods, from trainings in a plane."""
    with loading():
        from reproduction.pictures import PICTURES, picture
    unknown = [name for name in names or [] if name not in PICTURES]
    if unknown:
        raise UsageError(f"there is no picture {unknown[0]!r}. There are {', '.join(PICTURES)}.")
    _be_quiet()
    ends = {}
    for name in names or PICTURES:
        with open_console(True).status(f"training for the picture of {name}"):
            figure, ends[name] = picture(name)
        figure.savefig(f"{folder}/{name}.png", dpi=160, metadata={"Software": None})
    if json_output:
        emit({"distances": ends})
        return
    for name, found in ends.items():
        print(f"{folder}/{name}.png: distance to the best point at the end, median of five seeds (range)")
        for method, (median, low, high) in found.items():
            print(f"  {method}: {median:.2g} ({low:.2g} to {high:.2g})")


def unpack_cifar10(
    shards: Annotated[str, typer.Argument(help="Folder with train-00.npz ..., test-00.npz ...")],
    target: Annotated[str, typer.Argument(help="Where cifar-10-batches-bin is made.")],
) -> None:
    """Write CIFAR-10 as published from lossless shards, for `equipoise train --data cifar10`."""
    from reproduction.data import cifar_shards

    print(cifar_shards.unpack_cifar10(shards, target))


def _be_quiet() -> None:
    """Keep off the screen what accountants and the published recipes warn of: it is the point here."""
    quiet()
    warnings.filterwarnings("ignore", category=UserWarning, module="equipoise.methods")


if __name__ == "__main__":
    sys.exit(main())

"""The command line: a thin face over the rooms of the library.

Every command takes ``--json`` (one object on standard output, nothing else there) and ``--run-dir``. What is
meant for people goes to standard output without ``--json`` and to standard error with it. A value that cannot
be used gives a message in prose and exit code 2; a training gives 130 after Ctrl-C and 143 after SIGTERM; a
fault of the library itself keeps its traceback, which is worth reporting.

torch and the rooms are imported inside the commands, so that ``--help`` is quick, and after the options were
checked, so that a slip is answered at once.

A command is a function in a file of this folder, imported here and named in `COMMANDS`, whose order
``--help`` keeps. Options that several commands take are in `words`, what is printed goes through `screen`.
"""

from __future__ import annotations

import errno
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise._extras import lacking
from equipoise._files import explained
from equipoise._say import at_width
from equipoise._version import __version__
from equipoise.app.option_checks import ELSEWHERE, USUAL_NAMES, in_option_words
from equipoise.app.run_checks import SETTINGS_FILE
from equipoise.app.settings import RunSettings, facts
from equipoise.cli.audit_command import audit
from equipoise.cli.plan_commands import calibrate, check, methods, recipe, schema
from equipoise.cli.result_commands import export, predict, report
from equipoise.cli.screen import fail
from equipoise.cli.training_commands import compare, federate, resume, search, sweep, train
from equipoise.cli.verify_command import sign, verify

CRASHED = 70
"""The exit code of a crash (EX_SOFTWARE): Python's own, 1, means to `verify` that a statement is wrong."""

COMMANDS: dict[Callable[..., None], str] = {
    calibrate: "equipoise calibrate --population 6000 --batch-size 256 --epochs 9 --epsilon 2",
    check: "equipoise check mlp-tanh --data digits",
    recipe: "equipoise recipe cifar10 > mine.toml",
    train: "equipoise train --data digits --epsilon 3\n\nequipoise train --config run.toml --dry-run",
    resume: "equipoise resume runs/NAME",
    report: "equipoise report runs/NAME",
    predict: "equipoise predict runs/NAME --output predicted.csv",
    export: "equipoise export runs/NAME --format state-dict",
    verify: "equipoise verify runs/NAME --key issuer.pub",
    sign: "equipoise sign runs/NAME --key issuer.pem",
    methods: "equipoise methods dp-sgd dice-sgd",
    compare: "equipoise compare --data digits --methods dp-sgd,auto-s --epsilon 3",
    sweep: "equipoise sweep --data digits --grid epsilon=1,3,8 --grid seed=0,1,2 --jobs 2",
    search: "equipoise search --data digits --grid learning_rate=0.3,1,3 --private-validation 0.1",
    federate: "equipoise federate --data digits --clients 5 --rounds 20",
}
"""The commands, with the example that ``--help`` of each ends with."""

GONE = {
    "experiment": "The papers' experiments are in the sources: run python -m reproduction in a checkout.",
    "advise": "docs/methods/index.md says which method and settings to take, and `equipoise train --dry-run` "
    "what they cost.",
    "data": "`equipoise data describe` is `equipoise schema init` now.",
}
"""Where what a former command did is found."""

app = typer.Typer(
    name="equipoise",
    help="Differentially private training for PyTorch, with methods against clipping bias and a guarantee "
    "that others can check.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, example in COMMANDS.items():
    app.command(epilog=example)(command)
app.add_typer(schema)
app.add_typer(audit)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"equipoise {__version__}")
        raise typer.Exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    >>> main(["--version"])
    equipoise 0.2.0
    0
    """
    if arguments is None:  # a program of its own
        warn_once()
    return run_app(app, sys.argv[1:] if arguments is None else arguments, "equipoise")


def warn_once() -> None:
    """Say each warning once, in words of options and without the line of our source that gave it."""
    said = set[str]()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        words = in_option_words(str(message), facts(RunSettings))
        if words not in said:
            print(at_width(f"Warning: {words}"), file=sys.stderr)
        said.add(words)

    warnings.showwarning = show


def run_app(
    chosen: typer.Typer, words: list[str], name: str, packages: tuple[str, ...] = ("equipoise",)
) -> int:
    """Run a command line: errors that were raised on purpose become messages and exit codes.

    Args:
        chosen: the commands.
        words: what stands after the program's name.
        name: of the program, as its help shows it.
        packages: whose errors are messages; an error from elsewhere is printed with its traceback.
    """
    as_json = any(word.split("=")[0] in ("--json", "--log") for word in words)
    try:
        code = chosen(words, standalone_mode=False, prog_name=name)
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return fail("interrupted", as_json, 130, name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (said := lacking(str(error.name))):
            return fail(said, as_json, 2, name)
        if not is_taught(error, packages):
            traceback.print_exc()
            return CRASHED
        found = _words(error)
        return fail(found, as_json, 2, name) if found else 2  # without a word the parser has shown the help
    return int(code or 0)


def is_taught(error: Exception, packages: tuple[str, ...] = ("equipoise",)) -> bool:
    """Whether an error was raised on purpose: by the parser, by a package, or by the system (a full disk).

    A TypeError out of torch, say, is a fault: it keeps its traceback.
    """
    if isinstance(error, OSError) or hasattr(error, "format_message"):
        return True
    if not isinstance(error, ValueError | RuntimeError | TypeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(packages)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        place, is_full = str(error.filename or "a file"), error.errno in _FULL
        error = explained(error, repr(place))
        run = next((one for one in Path(place).parents if (one / SETTINGS_FILE).is_file()), None)
        if is_full and run is not None:
            return f"{error}. Then go on with: equipoise resume {shlex.quote(str(run))}"
    # typer's parser errors have a message of their own; their classes moved between its versions
    message = getattr(error, "format_message", None)
    if message is None:
        return in_option_words(str(error), facts(RunSettings))
    # the parser and the parser below it may both append the same suggestion
    said = " Did you mean ".join(dict.fromkeys(str(message()).split(" Did you mean ")))
    command = getattr(getattr(error, "ctx", None), "command", None)
    wrong = re.match(r"No such (?:option:?|command) '?([\w-]+)", said)
    word = wrong[1].replace("_", "-") if wrong else ""
    word = USUAL_NAMES.get(word, word)
    known = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
    if word in known:
        return f"{said.split('.')[0]}. Did you mean '{word}'?"
    where = getattr(command, "name", "")
    if where == "audit" and wrong and not word.startswith("-"):
        word = "--run-dir"
    instead = GONE.get(word) or ELSEWHERE.get((where, word))
    return f"{said} {instead}" if instead else said

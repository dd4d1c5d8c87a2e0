"""``equipoise check``: whether a model and its loss keep records apart."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.shared_options import DataDir, Json

__all__ = ["check"]


def check(
    model: Annotated[str, typer.Argument(help="package.module:function that makes the model, or a name.")],
    data: Annotated[str, typer.Option(help="Data that it takes: a named set or a file, as for train.")],
    data_dir: DataDir = None,
    json_output: Json = False,
) -> None:
    """Prove that a model keeps records apart, or say why it is not proved, with exit code 1."""
    from equipoise.app.option_checks import check_data_and_model
    from equipoise.app.settings import RunSettings

    check_data_and_model(data, model)
    with loading():
        from equipoise.app.train import independence_of
        from equipoise.gradients import CrossRecordError

    quiet()
    console = open_console(json_output)
    settings = RunSettings(data=data, model=model, data_dir=data_dir, noise_multiplier=1.0)
    try:
        found = independence_of(settings, console)
        word, reason, said = str(found.word), found.reason, str(found)
    except CrossRecordError as error:
        word, reason, said = "refused", str(error), f"refused: {error}"
    if json_output:
        emit({"model": model, "data": data, "independence": word, "reason": reason})
    console.print(f"{model} on {data}: {said}", markup=False, soft_wrap=True)
    if word != "proved":
        raise typer.Exit(1)

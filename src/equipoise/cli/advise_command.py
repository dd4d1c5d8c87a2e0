"""``equipoise advise``: what to train with, and why."""

from __future__ import annotations

from equipoise.app.settings import OF_OWN_DATA, AdviceSettings, RunSettings
from equipoise.cli.option_file import option_file
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.settings_options import settings_options
from equipoise.cli.shared_options import Json

__all__ = ["advise"]


@option_file
@settings_options(
    RunSettings,
    "data", "data_dir", *OF_OWN_DATA, "subset", "public_records", "model", "epsilon", "delta", "epochs",
    "batch_size", "clip_norm", "learning_rate", "device",
    parameter="base",
)  # fmt: skip
@settings_options(AdviceSettings, parameter="asked")
def advise(base: RunSettings, asked: AdviceSettings, json_output: Json = False) -> None:
    """Recommend a method and settings for data and budget, with reasons and a dry run; spends nothing."""
    from equipoise.app.option_checks import check_data_and_model

    check_data_and_model(base.data, base.model)
    base.check()
    asked.check()
    with loading():
        from equipoise.app.advice import advise as recommend

    quiet()
    found = recommend(base, asked, open_console(json_output))
    if json_output:
        emit(found)

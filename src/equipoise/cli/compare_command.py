"""``equipoise compare``: methods at one budget."""

from __future__ import annotations

from dataclasses import replace

from equipoise.app.contenders import Comparison
from equipoise.app.option_checks import check_data_and_model
from equipoise.app.settings import OF_OWN_DATA, RunSettings
from equipoise.cli.screen import emit, loading, open_console, quiet
from equipoise.cli.settings_options import option_file, settings_options
from equipoise.cli.shared_options import Json, RunDir

__all__ = ["compare"]


@option_file
@settings_options(Comparison, "methods", "seeds", "trials", "learning_rates", "option", parameter="asked")
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
def compare(base: RunSettings, asked: Comparison, json_output: Json = False, run_dir: RunDir = None) -> None:
    """Compare methods at one budget over several seeds; resumes an interrupted comparison."""
    check_data_and_model(base.data, base.model)
    comparison = replace(asked, base=base)
    comparison.check()
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

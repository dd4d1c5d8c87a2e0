import io
import json
import math
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from equipoise.report import Run, RunFolderError, read_run, render_page, summary, write_report
from equipoise.report.figures import Curve, chart
from equipoise.report.phrases import epsilon_in_words, guessing_bound, promise_in_words


def test_page_is_self_contained_and_complete(run_folder):
    page = write_report(run_folder).read_text()
    assert "<script" not in page
    assert not re.search(r"""src\s*=|href\s*="(?!#)|url\(|@import|https?://""", page)
    assert page.count("<svg") == 3
    for text in (
        "94.5%",
        "2.994",
        "1e-5",
        "proven",
        "mlp-tanh on digits",
        "7.25",
        "equipoise train --data digits",
        "This page alone proves nothing",
        "equipoise verify FOLDER",
        "Once signed, also every *.sig.json.",
    ):
        assert text in re.sub("<[^>]*>", "", page)
    assert "prefers-color-scheme: dark" in page
    assert "statement.sig.json" not in page
    run, independence = read_run(run_folder), {"model": "compared", "data": "proved"}
    page = render_page(Run(run.name, {**run.statement, "independence": independence}))
    assert "private, if records are kept apart (compared): adding" in re.sub("<[^>]*>", "", page)


def test_page_shows_nothing_private(run_folder):
    page = render_page(read_run(run_folder))
    assert "123456" not in page


def test_a_factor_beyond_all_floats_is_right_and_is_called_worthless():
    said = promise_in_words(30_800.0, 1e-5, "add_or_remove_one")
    assert "e^30,800, which is below 10^13,377," in said  # 30,800 / ln 10 = 13,376.2
    assert "promises nothing in practice" in said
    assert "e^20.00 = 4.9e+8," in promise_in_words(20.0, 1e-5, "replace_one")
    assert "practice" not in promise_in_words(3.0, 1e-5, "replace_one")


def test_text_from_files_is_escaped(run_folder):
    config = json.loads((run_folder / "config.json").read_text())
    config["experiment"]["data"] = "<img onerror=x>"
    config["command"] = "equipoise train --data '<b>'"
    (run_folder / "config.json").write_text(json.dumps(config))
    page = render_page(read_run(run_folder))
    assert "<img" not in page
    assert "<b>" not in page


def test_missing_proof_and_reproducible_noise_are_shouted(run_folder):
    run = read_run(run_folder)
    hole = {**run.statement, "guarantee": "none", "epsilon": None, "holes": ["raw threshold"]}
    page = render_page(Run(run.name, hole, run.metrics, run.config))
    assert "no value" in page
    assert "raw threshold" in page
    assert "<p>Nothing. At least one step has no privacy proof" in page
    assert "right with probability" not in page
    assert "What nothing protects" in page
    assert "spends the budget again" in page
    page = render_page(Run(run.name, {**hole, "releases": []}, run.metrics, run.config))
    assert "spends the budget again" not in page
    page = render_page(Run(run.name, {**run.statement, "private": False}, run.metrics, run.config))
    assert "NOT PRIVATE" in page
    assert "<p>Nothing. The noise follows a public seed" in page
    assert "right with probability" not in page
    assert ">proven<" not in page
    assert "What nothing protects" in page
    assert "What the statement covers" in render_page(run)


def test_cut_last_line_of_metrics_is_left_out(run_folder):
    file = run_folder / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 81, "epsi')
    assert read_run(run_folder).last("step") == 80


def test_folders_that_are_not_runs(tmp_path, run_folder):
    with pytest.raises(RunFolderError, match="is not a folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match=r"no statement\.json, and no run was begun in it"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        RunFolderError, match=r"no statement\.json: the run is not finished.*equipoise resume"
    ):
        read_run(tmp_path)
    (run_folder / "statement.json").write_text("{")
    with pytest.raises(RunFolderError, match="not valid JSON"):
        read_run(run_folder)
    (run_folder / "statement.json").write_text("[1]")
    with pytest.raises(RunFolderError, match="not a JSON object"):
        read_run(run_folder)


def test_every_evaluation_is_shown(run_folder):
    rows = [{"step": step, "evaluation.<rmse>": 2.0 / step, "evaluation.odd": "none"} for step in (1, 2, 3)]
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    run = read_run(run_folder)
    assert run.other_evaluations == ["<rmse>"]
    assert "&lt;rmse&gt;" in render_page(run)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(run, "runs/digits-sample"))
    assert "0.6667" in console.export_text()


def test_a_run_without_an_accuracy_shows_what_says_most_beside_its_baseline(run_folder):
    row = {"step": 80, "evaluation.mae": 1.5, "evaluation.r2": 0.75, "evaluation.rmse": 2.0}
    details = {"baseline_rmse": 4.0, "baseline": "always giving the mean", "test_records": 9}
    details["test_records_apart"] = True
    page = render_page(Run("r", read_run(run_folder).statement, [row], {"experiment": details}))
    headline = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition("What this run promises")[0]))
    assert "Test RMSE 2 on 9 test records, none of them trained on; 4 by always giving the mean" in headline
    assert page.index(">RMSE<") < page.index(">MAE<")
    assert "The RMSE was measured on the test records" in page


def test_a_stopped_run_says_what_is_claimed_and_what_is_spent(run_folder):
    rows = (run_folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_folder / "metrics.jsonl").write_text("".join(rows[:20]))
    run = read_run(run_folder)
    early = Run(run.name, run.statement, run.metrics, {**run.config, "ended_after": 20})
    assert early.ended_early
    assert not early.is_unfinished
    assert early.steps_in_words == "20 of 80"
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(summary(run, "runs/digits-sample"))
    text = console.export_text()
    assert re.search("privacy claimed +ε = 2.994", text)
    assert re.search("spent so far +ε = 1.497 by step 20", text)
    assert re.search("steps +20 of 80 ", text)
    assert "20 of 80 steps" in render_page(run)
    ended = Run(run.name, {**run.statement, "stop_fixed_beforehand": True}, run.metrics, run.config)
    console.print(summary(ended, "runs/digits-sample"))
    assert re.search("privacy spent +ε = 2.994", console.export_text())


def test_a_long_run_is_read_in_part(run_folder, monkeypatch):
    steps = [{"step": k, "learning_rate": 0.1, "released_norm": 1.0} for k in range(1, 1001)]
    scores = [{"step": k, "evaluation.accuracy": k / 1000} for k in range(100, 1001, 100)]
    rows = sorted(steps + scores, key=lambda row: row["step"])
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = read_run(run_folder)
    assert whole.metrics == rows
    monkeypatch.setattr("equipoise.report.run_reader.MOST_ROWS", 50)
    part = read_run(run_folder)
    assert len(part.metrics) <= 50 + 10 + 1
    assert part.curve("evaluation.accuracy") == whole.curve("evaluation.accuracy")
    assert part.metrics == sorted(part.metrics, key=rows.index)
    assert part.last("released_norm") == whole.last("released_norm")
    assert part.metrics[-1] == rows[-1]
    assert part.last("step") == 1000
    monkeypatch.setattr("equipoise.report.run_reader.MOST_ROWS", 3)
    assert read_run(run_folder).accuracy == 1.0  # of the scores, too, the last one stays
    rows = [{**row, "epsilon": 1.0} if "learning_rate" in row else row for row in rows]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("equipoise.report.run_reader.MOST_ROWS", 50)
    assert read_run(run_folder).curve("evaluation.accuracy") == whole.curve("evaluation.accuracy")


def drawn(*curves, **options):
    svg = chart("t <i>", "", curves, x_label="x", **options)[0]["svg"]
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    texts = [(node.text, node.get("style", "")) for node in root.iter("text")]
    return svg, texts


def test_chart_leaves_out_what_is_not_finite():
    svg, _ = drawn(Curve("a", [0, 1, 2, 3], [math.nan, 2.0, math.inf, 4.0]))
    assert "nan" not in svg
    assert "inf" not in svg.replace("linejoin", "")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 4700), (0.93, 0.941), (-3, 7), (1e-6, 3e-6)])
def test_ticks_are_few_and_different(low, high):
    _, texts = drawn(Curve("a", [low, high], [low, high]))
    for anchor in ("middle", "end"):
        found = [text for text, style in texts if f"anchor: {anchor}" in style and text != "x"]
        assert 2 <= len(found) <= 8
        assert len(set(found)) == len(found)


def test_an_axis_of_shares_makes_no_drama_of_chance():
    _, texts = drawn(Curve("a", (1, 2), (0.840, 0.846)), percent=True)
    shown = [float(text[:-1]) for text, _ in texts if text.endswith("%")]
    assert max(shown) - min(shown) >= 8


def test_a_chart_loads_nothing_and_takes_the_colours_of_the_page():
    curve = Curve("a <b> $x$", [0, 1], [0.1, 0.2], [0.0, 0.1], [0.2, 0.3])
    svg, texts = drawn(curve, curve, target=(0.2, "$budget$ <3>"), percent=True)
    assert not re.search(r"""src\s*=|href\s*="(?!#)|url\(|@import|https?:|xmlns|<style""", svg)
    colours = set(re.findall('(?:fill|stroke): ([^;"]+)', svg))
    assert colours >= {"none", "var(--s1)", "var(--s2)", "var(--line)", "var(--soft)"}
    assert "$budget$ <3>" in [text for text, _ in texts]
    assert 'aria-label="t &lt;i&gt;"' in svg
    assert svg == drawn(curve, curve, target=(0.2, "$budget$ <3>"), percent=True)[0]


def test_each_term_has_a_link_to_its_place_in_the_glossary(run_folder):
    page = render_page(read_run(run_folder))
    links, places = (set(re.findall(pattern, page)) for pattern in ('href="#([a-z-]+)"', 'id="([a-z-]+)"'))
    assert {"epsilon", "delta", "guarantee", "noise-multiplier"} <= links <= places


@pytest.mark.parametrize("epsilon", [0.1, 3.0, 8.0, 12.0, 20.0])
def test_a_bound_below_one_is_not_said_to_be_certain(epsilon):
    percent = float(re.search(r"most ([\d.]+)%", epsilon_in_words(epsilon, 1e-10, "add_or_remove_one"))[1])
    assert 100 * guessing_bound(epsilon, 1e-10) <= percent < 100


def test_guessing_bound_against_the_gaussian_mechanism():
    """A Gaussian with sensitivity 1 and deviation s: the best guess is right with probability Phi(1 / 2s)."""
    from scipy.stats import norm

    for s in (0.7, 1.0, 3.0):
        for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0):
            delta = norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * norm.cdf(-0.5 / s - epsilon * s)
            assert norm.cdf(0.5 / s) <= guessing_bound(epsilon, delta) + 1e-12
    assert guessing_bound(1e4, 1e-5) == 1.0

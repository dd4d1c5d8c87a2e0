import json
import math
import re
from xml.etree import ElementTree

import pytest

from equipoise.report import Run, RunFolderError, read_run, render_page, write_report
from equipoise.report.figures import Curve, chart
from equipoise.report.phrases import epsilon_in_words, guessing_bound


def test_page_is_self_contained_and_complete(run_folder):
    page = write_report(run_folder).read_text()
    assert "<script" not in page
    assert not re.search(r"""src\s*=|href\s*="(?!#)|url\(|@import|https?://""", page)
    assert page.count("<svg") == 3
    assert "123456" not in page  # a loss of the private folder
    for text in ("94.5%", "2.994", "1e-5", "proven", "mlp-tanh on digits", "7.25", "equipoise verify FOLDER"):
        assert text in re.sub("<[^>]*>", "", page)
    run, independence = read_run(run_folder), {"model": "compared", "data": "proved"}
    page = render_page(Run(run.name, {**run.statement, "independence": independence}))
    assert "private, if records are kept apart (compared): adding" in re.sub("<[^>]*>", "", page)


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

    def page(**changes):
        return render_page(Run(run.name, run.statement | changes, run.metrics, run.config))

    hole = {"guarantee": "none", "epsilon": None, "holes": ["raw threshold"]}
    for text, words in (
        (page(**hole), ("no value", "raw threshold", "<p>Nothing. At least one step has no privacy proof")),
        (page(private=False), ("NOT PRIVATE", "<p>Nothing. The noise follows a public seed")),
    ):
        assert all(word in text for word in (*words, "What nothing protects"))
        assert "right with probability" not in text
    assert "spends the budget again" in page(**hole)
    assert "spends the budget again" not in page(**hole, releases=[])
    assert ">proven<" not in page(private=False)
    assert "What the statement covers" in render_page(run)


def test_folders_that_are_not_runs(tmp_path, run_folder):
    for folder, name, content, words in (
        (tmp_path / "nothing", None, "", "is not a folder"),
        (tmp_path, None, "", r"no statement\.json, and no run was begun in it"),
        (tmp_path, "config.json", "{}", r"no statement\.json: the run is not finished.*equipoise resume"),
        (run_folder, "statement.json", "{", "not valid JSON"),
        (run_folder, "statement.json", "[1]", "not a JSON object"),
    ):
        if name:
            (folder / name).write_text(content)
        with pytest.raises(RunFolderError, match=words):
            read_run(folder)


def drawn(*curves, **options):
    svg = chart("t <i>", "", curves, x_label="x", **options)[0]["svg"]
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    texts = [(node.text, node.get("style", "")) for node in root.iter("text")]
    return svg, texts


def test_a_chart_loads_nothing_and_takes_the_colours_of_the_page():
    curve = Curve("a <b> $x$", [0, 1], [0.1, 0.2], [0.0, 0.1], [0.2, 0.3])
    not_finite = Curve("a", [0, 1, 2, 3], [math.nan, 2.0, math.inf, 4.0])
    assert not re.search("nan|inf", drawn(not_finite)[0].replace("linejoin", ""))
    svg, texts = drawn(curve, curve, target=(0.2, "$budget$ <3>"), percent=True)
    assert not re.search(r"""src\s*=|href\s*="(?!#)|url\(|@import|https?:|xmlns|<style""", svg)
    colours = set(re.findall('(?:fill|stroke): ([^;"]+)', svg))
    assert colours >= {"none", "var(--s1)", "var(--s2)", "var(--line)", "var(--soft)"}
    assert "$budget$ <3>" in [text for text, _ in texts]
    assert 'aria-label="t &lt;i&gt;"' in svg
    assert svg == drawn(curve, curve, target=(0.2, "$budget$ <3>"), percent=True)[0]


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

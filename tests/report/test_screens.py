"""No page is wider than a screen, drawn with Chromium where there is one."""

import importlib.util
from pathlib import Path

import pytest
from invented import comparison, federation

from equipoise.report.comparison_page import render_comparison
from equipoise.report.federation_page import render_federation
from equipoise.report.run_page import render_page
from equipoise.report.run_reader import read_run

SOURCE = Path(__file__).resolve().parents[2] / "docs" / "report_pictures.py"


@pytest.fixture(scope="module")
def source():
    spec = importlib.util.spec_from_file_location("report_pictures", SOURCE)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def pictures(source):
    if source.chromium() is None:
        pytest.skip("needs Chromium")
    return source


@pytest.fixture(params=["run", "comparison", "federation"])
def page(request, run_folder):
    if request.param == "run":
        return render_page(read_run(run_folder))
    return (
        render_comparison(comparison()) if request.param == "comparison" else render_federation(federation())
    )


@pytest.mark.parametrize("width", [380, 1400])
def test_a_page_fits_its_screen_and_is_light_or_dark(pictures, page, width):
    light, needed = pictures.draw(page, width, False)
    dark, _ = pictures.draw(page, width, True)
    assert (light.width, needed) == (width, width)
    assert light.size == dark.size
    assert sum(light.getpixel((2, 2))) > 600 > 200 > sum(dark.getpixel((2, 2)))


def test_a_page_that_is_too_wide_is_noticed(pictures, run_folder):
    page = render_page(read_run(run_folder)).replace("<h2>", "<h2 style='width:600px'>", 1)
    assert pictures.draw(page, 380, False)[1] > 600

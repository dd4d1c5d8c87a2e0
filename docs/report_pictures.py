"""Pictures of the pages of runs, comparisons and federations: wide and narrow screens, light and dark.

    python docs/report_pictures.py [--runs FOLDER] [--all FOLDER]

Trains on digits, draws each page with Chromium, and writes docs/figures/report-*.png. It stops where a page
is wider than its screen. Runs that lie in the folder of `--runs` are drawn as they are. `--all` keeps every
page whole, a picture for each screen.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FIGURES = Path(__file__).parent / "figures"
WIDE, NARROW = 1400, 380
PAGES = {
    "run": ("train --epsilon 3", "report.html"),
    "comparison": (
        "compare --methods dp-sgd,auto-s,dp-c4-plus,sgd --seeds 3 --trials 1 --epsilon 3",
        "comparison.html",
    ),
    "federation": ("federate --method adaptdp-fedavg --clients 5 --rounds 20 --epsilon 8", "report.html"),
}

# The page in a frame as wide as the screen, since Chromium makes no window below 500 pixels. The frame says
# how large the page is.
FRAME = """<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0 }} iframe {{ border: 0; display: block; width: {width}px }}</style>
<iframe srcdoc="{page}"></iframe><p></p><script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument.documentElement;
  frame.style.height = page.scrollHeight + "px";
  document.querySelector("p").textContent = `size ${{page.scrollWidth}} ${{page.scrollHeight}}`;
}};</script>"""


def chromium() -> str | None:
    """The browser, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def draw(page: str, width: int, dark: bool) -> tuple[Image.Image, int]:
    """A page as a screen of this width shows it, whole, and how wide it is by itself."""
    with tempfile.TemporaryDirectory() as folder:
        framed, picture = Path(folder, "framed.html"), Path(folder, "picture.png")
        framed.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
        command = [
            str(chromium()),
            "--headless=new",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]

        def run(*more: str) -> str:
            words = [*command, *more, framed.as_uri()]
            return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout

        size = re.search(r"size (\d+) (\d+)", run("--dump-dom"))
        assert size is not None
        run(f"--window-size={max(width, 500)},{size[2]}", f"--screenshot={picture}")
        with Image.open(picture) as image:
            return image.convert("RGB").crop((0, 0, width, int(size[2]))), int(size[1])


def together(screens: dict[tuple[int, bool], Image.Image]) -> Image.Image:
    """The tops of the wide pictures, each beside two columns of the narrow one; light above dark."""
    rows = []
    for dark in (False, True):
        wide, narrow = screens[WIDE, dark], screens[NARROW, dark]
        wide = wide.resize((700, round(wide.height * 700 / WIDE)), Image.Resampling.LANCZOS)
        narrow = narrow.resize((250, round(narrow.height * 250 / NARROW)), Image.Resampling.LANCZOS)
        row = Image.new("RGB", (1224, 900), "#808080")
        row.paste(wide.crop((0, 0, 700, 900)), (0, 0))
        for column in (0, 1):
            row.paste(narrow.crop((0, 900 * column, 250, 900 * (column + 1))), (712 + 262 * column, 0))
        rows.append(row)
    whole = Image.new("RGB", (1224, 1812), "#808080")
    for number, row in enumerate(rows):
        whole.paste(row, (0, 912 * number))
    # the one that keeps rare colours
    return whole.quantize(200, method=Image.Quantize.MAXCOVERAGE, kmeans=2)


def main() -> None:
    """Make the runs that are missing, and draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs are, or are to be made")
    parser.add_argument("--all", type=Path, help="where to keep every picture")
    asked = parser.parse_args()
    if chromium() is None:
        raise SystemExit("There is no chromium, chromium-browser or google-chrome. Install one of them.")
    with tempfile.TemporaryDirectory() as temporary:
        runs = asked.runs or Path(temporary)
        for name, (words, file) in PAGES.items():
            if not (runs / name / file).exists():
                command = [sys.executable, "-m", "equipoise", *words.split(), "--data", "digits"]
                subprocess.run([*command, "--run-dir", str(runs / name)], check=True)
            page = (runs / name / file).read_text(encoding="utf-8")
            screens = {}
            for width in (WIDE, NARROW):
                for dark in (False, True):
                    screens[width, dark], size = draw(page, width, dark)
                    if size > width:
                        raise SystemExit(f"The page of {name} is {size} pixels wide on a screen of {width}.")
                    if asked.all:
                        asked.all.mkdir(parents=True, exist_ok=True)
                        shade = "dark" if dark else "light"
                        screens[width, dark].save(asked.all / f"{name}-{width}-{shade}.png")
            together(screens).save(FIGURES / f"report-{name}.png", optimize=True)


if __name__ == "__main__":
    main()

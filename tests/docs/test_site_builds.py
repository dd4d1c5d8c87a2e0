"""The site builds without a warning, and fetches nothing from elsewhere."""

import os
import re
import subprocess
import sys

import pytest
from pages import ROOT

FETCHES = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["'](https?://[^"']+)""")


def test_the_strict_build(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    fetched = {
        address
        for page in (tmp_path / "site").rglob("*.html")
        for address in FETCHES.findall(page.read_text(encoding="utf-8"))
    }
    assert fetched == set()

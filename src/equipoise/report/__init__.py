"""Pages and summaries of a run, made from its publishable files."""

from equipoise._run_files import RunFolderError
from equipoise.report.run_page import render_page, write_report
from equipoise.report.run_reader import Run, read_run
from equipoise.report.terminal import summary

__all__ = ["Run", "RunFolderError", "read_run", "render_page", "summary", "write_report"]

"""Pages and summaries of a run, made from its publishable files."""

from equipoise.report.json_files import RunFolderError
from equipoise.report.run_page import render_page, report_as_made, write_report
from equipoise.report.run_reader import Run, read_run
from equipoise.report.terminal import summary

__all__ = ["Run", "RunFolderError", "read_run", "render_page", "report_as_made", "summary", "write_report"]

"""Measurements as one self-contained page: no script, nothing fetched, the same bytes for the same records."""

from laconic_lab.report.page import write_report, write_report_so_far

__all__ = ["write_report", "write_report_so_far"]

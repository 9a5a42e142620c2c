"""The HTML report of a run."""

from opteq.report.page import write

__all__ = ["write"]

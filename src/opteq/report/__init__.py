"""The page that a run leaves behind."""

from opteq.report.page import write

__all__ = ["write"]

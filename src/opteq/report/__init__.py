"""HTML reports: of a run, of several runs side by side, and of single predictions."""

from opteq.report.comparison import compare
from opteq.report.page import write

__all__ = ["compare", "write"]

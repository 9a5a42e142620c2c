"""Accuracy of a trained classifier on corrupted and attacked images, and certified accuracy, in one record."""

from opteq.training.robustness.corrupted import measure_corruptions, relative_errors
from opteq.training.robustness.curves import measure_curves
from opteq.training.robustness.evaluate import evaluate_robustness, random_rows
from opteq.training.robustness.record import FILE, markdown, read_record

__all__ = [
    "FILE",
    "evaluate_robustness",
    "markdown",
    "measure_corruptions",
    "measure_curves",
    "random_rows",
    "read_record",
    "relative_errors",
]

"""Accuracy of a trained classifier on corrupted and attacked images, and certified accuracy, in one record."""

from opteq.training.robustness.corrupted import measure_corruptions, relative_errors
from opteq.training.robustness.curves import measure_curves
from opteq.training.robustness.evaluate import chosen_rows, evaluate_robustness
from opteq.training.robustness.record import FILE, markdown, read_record

__all__ = [
    "FILE",
    "chosen_rows",
    "evaluate_robustness",
    "markdown",
    "measure_corruptions",
    "measure_curves",
    "read_record",
    "relative_errors",
]

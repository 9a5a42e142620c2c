"""Accuracy of a trained classifier on corrupted and attacked images, and certified accuracy, in one record."""

from opteq.training.robustness.corrupted import measure_corruptions
from opteq.training.robustness.curves import measure_curves
from opteq.training.robustness.evaluate import evaluate_robustness
from opteq.training.robustness.record import FILE, markdown, read_record

__all__ = ["FILE", "evaluate_robustness", "markdown", "measure_corruptions", "measure_curves", "read_record"]

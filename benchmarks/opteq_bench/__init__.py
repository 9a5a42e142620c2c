"""The benchmark: time and memory of solver steps and training steps, beside the map, torchdeq and a lower bound."""

from opteq_bench.command import run

__all__ = ["run"]

"""What a solver's step and a training step cost, beside the bare map, torchdeq and the floor."""

from opteq_bench.command import run

__all__ = ["run"]

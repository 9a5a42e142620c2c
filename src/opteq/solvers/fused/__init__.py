"""Solver steps as a few Triton kernels, for GPUs: the same methods as beside, with the least traffic to memory."""

from opteq.solvers.fused.available import supports

__all__ = ["supports"]

"""Switches of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Which fast paths may be taken.

    Attributes:
        enabled: whether the engine is asked at all; see :func:`opteq.engine.off`.
        triton: whether captured solves use Triton kernels; without them, the plain loop's operations are captured.
        interpreted: run Triton kernels on a CPU by its interpreter: for tests.
    """

    enabled: bool = True
    triton: bool = True
    interpreted: bool = False


settings = Settings()

"""Switches of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Which fast paths may be taken.

    Attributes:
        offs: how many :func:`opteq.engine.off` are entered, in all threads; the engine is asked where there is none.
        triton: whether captured solves use Triton kernels; without them, the plain loop's operations are captured.
        calls_before_tracing: how many calls of a form run plainly on a CPU before a user's objective is traced.
        interpreted: run Triton kernels on a CPU by its interpreter: for tests.
    """

    offs: int = 0
    triton: bool = True
    calls_before_tracing: int = 2
    interpreted: bool = False


settings = Settings()

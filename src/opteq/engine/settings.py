"""Switches of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Which fast paths may be taken.

    Attributes:
        offs: how many :func:`opteq.engine.off` are entered, in all threads.
        triton: whether captured solves use Triton kernels; without them, the plain loop's operations are captured.
        interpreted: run Triton kernels on a CPU by its interpreter: for tests.
    """

    offs: int = 0
    triton: bool = True
    interpreted: bool = False

    @property
    def enabled(self) -> bool:
        """Whether the engine is asked at all."""
        return self.offs == 0


settings = Settings()

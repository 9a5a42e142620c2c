"""When a run should stop by itself, and what it says then."""

from __future__ import annotations

import math

from opteq.training.metrics import Counts
from opteq.training.recipe.sections import GuardSection


class TrainingStopped(RuntimeError):  # noqa: N818 - it says what happened, as a sentence would
    """A run ended itself because going on would have trained nothing. Its last good checkpoint, if any, is kept.

    The command line prints the message and stops with status 3: the command was right, the training went wrong.
    """

    exit_status = 3


class Interrupted(RuntimeError):  # noqa: N818
    """A signal ended the run after a checkpoint; ``signal`` is its number, and the exit status is 128 more."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_status = 128 + signal


def judge(options: GuardSection, counts: Counts, where: str) -> None:
    """Raise :class:`TrainingStopped` where the numbers of an epoch so far say that it has failed.

    - The loss is not finite: the weights are lost.
    - More than the share ``lost`` of the equilibria have a relative residual above ``residual``: what the network
      hands on is no equilibrium, so neither its gradient nor its certificate means anything. A few such samples
      are no reason to stop; they are in the metrics.
    - Fewer than the share ``converged`` reached the solver's own tolerance. Off (0) by default: a tight tolerance with
      few steps is a fair way to train.

    Args:
        options: the ``[guard]`` of a recipe.
        counts: of the epoch so far.
        where: such as ``"epoch 3"``.
    """
    if not math.isfinite(counts.loss):
        raise TrainingStopped(
            f"{where}: the loss is {counts.mean_loss}. Try a lower optimizer.lr, train.clip=1.0, or a smaller bound on "
            "the model's operators; with precision fp16, try bf16"
        )
    if counts.solves and counts.lost_share > options.lost:
        raise TrainingStopped(
            f"{where}: {counts.lost_share:.0%} of the equilibria have a relative residual above {options.residual:g} "
            f"(mean {counts.residual / counts.solves:.2g}, worst {counts.worst:.2g}, {counts.mean_steps:.1f} steps "
            "on average). Try a smaller bound on the model's operators, more solver steps, or a lower optimizer.lr; "
            "guard.lost=1 lets it go on"
        )
    if counts.solves and counts.converged_share < options.converged:
        raise TrainingStopped(
            f"{where}: only {counts.converged_share:.0%} of the equilibria reached the solver's tolerance, and "
            f"guard.converged asks for {options.converged:.0%}. Try more solver steps, a larger tolerance, or a "
            "smaller bound on the model's operators"
        )

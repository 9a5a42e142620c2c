"""When a run stops itself, and with which message."""

from __future__ import annotations

from opteq.training.metrics import Metrics
from opteq.training.recipe.sections import GuardSection


class TrainingStopped(RuntimeError):  # noqa: N818 - public name
    """A run ended itself because training had failed. Its last good checkpoint, if any, is kept.

    The command line prints the message and stops with status 3: the command was right, the training went wrong.
    """

    exit_status = 3


class Interrupted(RuntimeError):  # noqa: N818
    """A signal ended the run after a checkpoint; ``signal`` is its number, and the exit status is 128 more."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_status = 128 + signal


def check_progress(options: GuardSection, metrics: Metrics, where: str, ended: bool = False) -> None:
    """Raise :class:`TrainingStopped` if the metrics of an epoch show that training has failed.

    - More than ``skipped`` steps in a row, or all steps of an epoch, were skipped because their loss or gradient was
      not finite. A few skipped steps are only recorded.
    - More than the fraction ``lost`` of the equilibria have a relative residual above ``residual``: the features are
      not at an equilibrium, so neither gradient nor certificate is meaningful. A few such samples are only recorded.
    - Fewer than the fraction ``converged`` reached the solver's tolerance. 0 (off) by default: a tight tolerance with
      few steps is a reasonable way to train.

    Args:
        options: the ``[guard]`` of a recipe.
        metrics: of the epoch so far.
        where: such as ``"epoch 3"``.
        ended: whether the epoch has ended.
    """
    if metrics.skipped_in_a_row > options.skipped or (ended and not metrics.samples):
        raise TrainingStopped(
            f"{where}: {metrics.skipped_in_a_row:.0f} steps in a row were skipped because their loss or gradient was "
            "not finite, or, with train.radius, because too many samples had no equilibrium. Try a lower optimizer.lr, "
            "train.clip=1.0, or a smaller bound on the model's operators; with precision fp16, try bf16"
        )
    if metrics.solves and metrics.lost_share > options.lost:
        raise TrainingStopped(
            f"{where}: {metrics.lost_share:.0%} of the equilibria have a relative residual above {options.residual:g} "
            f"(mean {metrics.residual / metrics.solves:.2g}, worst {metrics.worst:.2g}, {metrics.mean_steps:.1f} steps "
            "on average). Try a smaller bound on the model's operators, more solver steps, or a lower optimizer.lr; "
            "guard.lost=1 turns this check off"
        )
    if metrics.solves and metrics.converged_share < options.converged:
        raise TrainingStopped(
            f"{where}: only {metrics.converged_share:.0%} of the equilibria reached the solver's tolerance, and "
            f"guard.converged requires {options.converged:.0%}. Try more solver steps, a larger tolerance, or a "
            "smaller bound on the model's operators"
        )

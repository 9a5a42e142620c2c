"""The option ``--device``."""

from __future__ import annotations

import torch

from opteq.common.errors import UserError


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda`` for the option's ``auto``, ``cpu`` or ``cuda``; an error where torch sees no such device."""
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device should be auto, cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU, and torch finds none; use --device cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"

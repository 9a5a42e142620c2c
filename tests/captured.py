"""Solves as a GPU replays them, on a CPU: by what was given when they were captured, with copies of their tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import opteq
from opteq.engine.cuda_graphs import backend, cache
from opteq.engine.cuda_graphs.operations import CaptureCheck, SideEffectCheck
from opteq.solvers.loop import iterate


class Replays:
    """In the place of :mod:`opteq.engine.cuda_graphs.cache`: all of it but the graphs."""

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()
        self.kept: dict[Hashable, Any] = {}
        self.replayed = 0

    def run(self, key: Hashable, inputs: Sequence[Tensor], open_solve: Any) -> tuple[list[Any], object] | str:
        form = key, cache.environment(), tuple((one.shape, one.dtype, one.stride()) for one in inputs)
        if form not in self.seen:
            self.seen.add(form)
            return "the first call with inputs of this form is not captured"
        with torch.inference_mode(False), torch.no_grad():
            if form not in self.kept:
                self.kept[form] = self._captured(inputs, open_solve)
            if isinstance(self.kept[form], str):
                return self.kept[form]
            solve = self.kept[form]([one.clone() for one in inputs])
            iterate(solve.iteration)
            tensors = [one.clone() for one in solve.tensors(solve.iteration.finish())]
        self.replayed += 1
        return tensors, solve.facts

    def _captured(self, inputs: Sequence[Tensor], open_solve: Any) -> Any:
        copies = [one.clone() for one in inputs]
        try:
            with CaptureCheck(copies):
                solve = open_solve(copies)
                solve.iteration.begin()
                solve.iteration.advance()
            with SideEffectCheck(copies):
                solve.tensors(solve.iteration.finish())
        except Exception as error:
            return f"it could not be captured: {error}"
        return open_solve


def replay(patch: pytest.MonkeyPatch) -> Replays:
    """Take the path of a GPU from now on."""
    replays = Replays()
    patch.setattr(opteq.engine, "_backends", lambda: () if opteq.engine.settings.offs else (backend,))
    patch.setattr(opteq.engine, "bounded_weights", lambda module: opteq.engine.nullcontext())
    patch.setattr(cache, "unusable", lambda inputs: None)
    patch.setattr(cache, "run", replays.run)
    return replays

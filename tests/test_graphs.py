"""When stages of a captured solve are launched, looked at and read, on a device that is played by a queue.

What the stages compute is tested on a GPU (test_fast_paths_gpu.py). Here the device does its work at any time between
two calls, as a real one does, and every answer has to be that of its own batch, read late enough.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opteq.solvers import graphs
from opteq.solvers.graphs import StagedSolve, _Stage


class Device:
    """Work in the order in which it was launched, done when ``work`` is called."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def work(self, pieces: int | None = None) -> None:
        for _ in range(len(self.queue) if pieces is None else min(pieces, len(self.queue))):
            self.queue.popleft()()


class Launch:
    """A graph: what its replay does later."""

    def __init__(self, device: Device, work: Callable[[], None]) -> None:
        self.device, self.work, self.count = device, work, 0

    def replay(self) -> None:
        self.count += 1
        self.device.queue.append(self.work)


class Event:
    """Recorded in the queue; asking for it may find the device anywhere."""

    def __init__(self, device: Device, chance: random.Random | None) -> None:
        self.device, self.chance, self.recorded, self.reached = device, chance, 0, 0

    def record(self, stream: object) -> None:
        del stream
        self.recorded += 1
        number = self.recorded
        self.device.queue.append(lambda: setattr(self, "reached", number))

    def query(self) -> bool:
        if self.chance is None:  # the device is far behind
            return False
        self.device.work(self.chance.choice([0, 0, 1, 3]))
        return self.reached == self.recorded

    def synchronize(self) -> None:
        while self.reached != self.recorded:
            self.device.work(1)


class Solve:
    """A staged solve of three rows, each of which ends after a number of steps that its batch says."""

    def __init__(self, most: int, looks: bool, chance: random.Random | None) -> None:
        self.device = Device()
        self.batches: deque[Tensor] = deque()
        self.batch, self.at, self.read = torch.zeros(3), -1, (-1, torch.zeros(3))
        self.taken = list(range(most + 1)) if looks else [0, most]
        made: StagedSolve = object.__new__(StagedSolve)
        made.looks, made.device, made.coarse = looks, torch.device("cpu"), False
        made.expected = made.trusted = made.unread = made.steps = 0
        made.written = Event(self.device, chance)
        made.inputs = [torch.zeros(3)]
        made.left = [torch.ones(3, dtype=torch.int32) for _ in self.taken]
        made.stages = [
            _Stage(Launch(self.device, self.steps(place)), Launch(self.device, self.finish(place)), taken + 1)
            for place, taken in enumerate(self.taken)
        ]
        made._read_out = self.read_out  # type: ignore[method-assign]
        self.made = made

    def steps(self, place: int) -> Callable[[], None]:
        def work() -> None:
            if place == 0:
                self.batch, self.at = self.batches.popleft(), -1
            assert self.at == place - 1  # stages run in the order in which they were captured
            self.at = place
            self.made.left[place].copy_(self.batch > self.taken[place])

        return work

    def finish(self, place: int) -> Callable[[], None]:
        def work() -> None:
            assert self.at == place
            self.read = place, self.batch

        return work

    def read_out(self, place: int) -> list[Tensor]:
        answer = torch.full((4,), -1.0)

        def copy() -> None:
            answer[0], answer[1:] = self.read[0], self.read[1]

        self.made.stages[place].finish.replay()
        self.device.queue.append(copy)
        return [answer, torch.zeros(len(self.taken) + 100, 3)]

    def __call__(self, batch: Tensor) -> tuple[Tensor, int, int]:
        """The answer, which the device writes later, the length of its history, and how many stages were launched."""
        self.batches.append(batch)
        before = sum(stage.steps.count for stage in self.made.stages)
        answer, history = self.made([torch.zeros(3)])
        return answer, len(history), sum(stage.steps.count for stage in self.made.stages) - before


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda own, given: (own, given))


@pytest.mark.parametrize("most", [1, 3, 9, 40])
@pytest.mark.parametrize("looks", [True, False])
def test_every_answer_is_that_of_its_batch_read_late_enough(most: int, looks: bool) -> None:
    for seed in range(12):
        chance = random.Random(seed)
        solve, found, base = Solve(most, looks, chance), [], 0
        for call in range(60):
            if call == 0 or chance.random() < 0.1:
                base = chance.randint(0, most + 3)
            batch = torch.tensor([max(0, base - (chance.random() < 0.1)) for _ in range(3)])
            found.append((batch, *solve(batch)))
            if chance.random() < 0.4:
                solve.device.work()
        solve.device.work()
        for batch, answer, history, _ in found:
            needed = min(int(batch.max()), most)
            assert answer[1:].tolist() == batch.tolist()
            assert solve.taken[int(answer[0])] >= needed
            assert needed <= history - 1 <= solve.taken[int(answer[0])]


def test_a_solve_that_is_expected_right_launches_no_more_than_it_needs() -> None:
    solve = Solve(20, True, random.Random(0))
    launched = [solve(torch.tensor([4, 2, 1]))[2] for _ in range(8)]
    assert launched == [5] * 8  # the start, and four steps
    assert [solve(torch.tensor([3, 3, 3]))[2] for _ in range(3)] == [5, 4, 4]  # one too many, once
    assert [solve(torch.tensor([6, 3, 3]))[2] for _ in range(2)] == [7, 7]


def test_one_batch_to_the_last_step_is_not_the_rule_for_ever() -> None:
    solve = Solve(40, True, None)
    easy, hard = torch.tensor([5, 5, 5]), torch.tensor([60, 60, 60])
    launched = [solve(batch)[2] for batch in [easy, hard, *[easy] * 20]]
    assert launched[:2] == [6, 41]
    assert launched[2 + graphs._PATIENCE :] == [6] * (20 - graphs._PATIENCE)

"""When stages of a captured solve are launched, looked at and read, on a device that is played by a queue.

What the stages compute is tested on a GPU (test_fast_paths_gpu.py). Here the device does its work at any time between
two calls, as a real one does, and every answer has to be that of its own batch, read late enough.
"""

from __future__ import annotations

import gc
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from opteq.solvers import buffers, staged
from opteq.solvers.answers import Answers
from opteq.solvers.buffers import Buffer, SharedBuffers, fill, own
from opteq.solvers.loop import Finish, Rule
from opteq.solvers.staged import StagedSolve
from opteq.solvers.stages import Stage, _Settled, chunks


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
            self.device.work(1)
            return self.reached == self.recorded
        self.device.work(self.chance.choice([0, 0, 1, 3]))
        return self.reached == self.recorded

    def synchronize(self) -> None:
        while self.reached != self.recorded:
            self.device.work(1)


class Solve:
    """A staged solve of three rows, each of which ends after a number of steps that its batch says."""

    def __init__(self, most: int, looks: bool, chance: random.Random | None) -> None:
        self.device = Device()
        self.filled = self.batch = torch.zeros(3)
        self.at: int | None = None
        self.read = -1, self.batch
        self.taken = list(range(most + 1)) if looks else [0, most]
        made: StagedSolve = object.__new__(StagedSolve)
        made.looks, made.device, made.coarse = looks, torch.device("cpu"), False
        made.alone, made.patience, made.tell = False, staged._PATIENCE, None
        made.expected = made.trusted = made.unread = made.noted = made.steps = 0
        made.written = Event(self.device, chance)
        made.answer = SimpleNamespace(forget=lambda: None)  # type: ignore[assignment]
        made.inputs, made.whole, made.workshop = [], OrderedDict(), self  # type: ignore[assignment]
        made.age, self.buffers = 1, SharedBuffers()
        made.left = [torch.ones(3, dtype=torch.int32) for _ in self.taken]
        made.stages = [
            Stage(Launch(self.device, self.steps(place)), Launch(self.device, self.settle(place)), taken + 1)
            for place, taken in enumerate(self.taken)
        ]
        made._read_out = self.read_out  # type: ignore[method-assign]
        self.made = made

    def steps(self, place: int) -> Callable[[], None]:
        def work() -> None:
            if place == 0:
                self.batch, self.at = self.filled, -1
            assert self.at is not None
            assert self.at == place - 1
            self.at = place
            self.made.left[place].copy_(self.batch > self.taken[place])

        return work

    def settle(self, place: int) -> Callable[[], None]:
        def work() -> None:
            assert self.at == place
            self.read = place, self.batch

        return work

    def conclude(self) -> None:
        """Make the answer, in memory that steps may have used."""
        self.at = None

    def entered(self) -> nullcontext[None]:
        return nullcontext()

    def record(self, work: partial[None]) -> tuple[Launch, None]:
        """A graph of the whole solve, which leaves nothing that a stage could continue."""
        place = work.args[0]

        def whole() -> None:
            self.at, self.read = None, (place, self.filled)
            for noted in range(max(place - 1, 0), place + 1):
                self.made.left[noted].copy_(self.filled > self.taken[noted])

        return Launch(self.device, whole), None

    def read_out(self, place: int, whole: Launch | None, lend: bool) -> list[Tensor]:
        assert not lend
        answer = torch.full((4,), -1.0)

        def copy() -> None:
            answer[0], answer[1:] = self.read[0], self.read[1]

        if whole is None:
            self.made.stages[place].settle.replay()
            self.device.queue.append(self.conclude)
        self.device.queue.append(copy)
        return [answer, torch.zeros(len(self.taken) + 100, 3)]

    def __call__(self, batch: Tensor) -> tuple[Tensor, int, int]:
        """The answer, which the device writes later, the length of its history, and how many stages were launched."""
        self.device.queue.append(lambda: setattr(self, "filled", batch))
        before = self.launched
        answer, history = self.made([], None)
        return answer, len(history), self.launched - before

    @property
    def launched(self) -> int:
        """Stages that were launched so far; a whole solve counts as one."""
        whole = [graph for graph in self.made.whole.values() if graph is not None]
        return sum(graph.count for graph in (*(stage.steps for stage in self.made.stages), *whole))


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)


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
    launched = [solve(torch.tensor([4, 2, 1]))[2] for _ in range(11)]
    # The start and four steps; and all in one graph, once that has been the rule for a while.
    assert launched == [5] * (1 + staged._SETTLED) + [1] * (10 - staged._SETTLED)
    assert [solve(torch.tensor([3, 3, 3]))[2] for _ in range(3)] == [1, 4, 4]  # one too many, once
    assert [solve(torch.tensor([6, 3, 3]))[2] for _ in range(2)] == [7, 7]


def test_a_whole_solve_that_has_not_ended_is_taken_up_by_stages() -> None:
    solve = Solve(20, True, random.Random(0))
    for _ in range(10):
        assert solve(torch.tensor([4, 2, 1]))[1] == 5
    answer, history, launched = solve(torch.tensor([6, 0, 0]))
    solve.device.work()
    assert launched == 1 + 7  # in vain, then from the start
    assert answer.tolist() == [6, 6, 0, 0]
    assert history == 7


@pytest.mark.parametrize("settled", [2, 12])
def test_a_solve_after_one_that_was_interrupted(settled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device still writes for the one is not taken for the other."""
    for seed in range(20):
        solve = Solve(20, True, random.Random(seed))
        for _ in range(settled):
            solve(torch.tensor([2, 2, 2]))
        solve.device.work()

        def interrupted(place: int, quiet: bool) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(solve.made, "_goes_on", interrupted)
            with pytest.raises(KeyboardInterrupt):
                solve(torch.tensor([1, 1, 1]))
        answer, history, _ = solve(torch.tensor([9, 9, 9]))
        solve.device.work()
        assert answer.tolist() == [9, 9, 9, 9]
        assert history == 10


def test_whole_solves_are_few_and_one_that_could_not_be_captured_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solve = Solve(20, True, random.Random(0))
    for end in range(1, 8):
        for _ in range(12):
            solve(torch.full((3,), end))
    assert list(solve.made.whole) == [5, 6, 7]

    def no_memory(work: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(solve, "record", no_memory)
    for _ in range(12):
        answer, history, launched = solve(torch.full((3,), 9))
    solve.device.work()
    assert (launched, history) == (10, 10)
    assert answer.tolist() == [9, 9, 9, 9]


def test_one_batch_to_the_last_step_is_not_the_rule_for_ever() -> None:
    solve = Solve(40, True, None)
    easy, hard = torch.tensor([5, 5, 5]), torch.tensor([60, 60, 60])
    assert [solve(batch)[2] for batch in (easy, hard)] == [6, 41]
    for _ in range(2 * staged._PATIENCE + 1):
        solve(easy)
    assert solve.made.expected == 5


@pytest.mark.parametrize(("most", "every", "several"), [(50, 4, True), (50, 4, False), (7, 10, False), (300, 4, True)])
def test_chunks_make_up_all_steps_and_are_few(most: int, every: int, several: bool) -> None:
    rule = Rule(tol=1e-3, max_steps=most, check_every=every)
    made = chunks(rule, several)
    assert sum(made) == most
    assert min(made) >= 1
    assert len(made) < 50
    assert made[0] == (min(every, most) if several else 1)


def test_a_buffer_is_filled_where_it_does_not_hold_the_values_already(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    copy = buffers.copy_all

    def counting(own: list[Tensor], given: list[Tensor]) -> None:
        copied.append(len(own))
        copy(own, given)

    monkeypatch.setattr(buffers, "copy_all", counting)
    weight, state = torch.randn(3), torch.randn(3)
    first = SharedBuffers().lot().filled([weight, state])
    fill(first, [weight, state])
    assert copied == [2]
    weight.add_(1)  # seen by the count of its changes
    fill(first, [weight, state])
    fill(first, [weight, state.clone()])  # another tensor, though its values are the same
    with torch.inference_mode():
        unseen = torch.ones(3)
    fill(first, [weight, unseen])
    fill(first, [weight, unseen])  # its changes are not counted, so it is copied every time
    assert copied == [2, 1, 1, 1, 1]
    assert torch.equal(first[0].tensor, weight)
    assert torch.equal(first[1].tensor, unseen)
    first[0].note(None)
    assert not first[0].holds(weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_answers_are_written_and_copied_out(dtype: torch.dtype) -> None:
    rows, longest = 3, 6
    answers = None
    lot = SharedBuffers().lot()
    for _ in range(3):
        state, features = torch.randn(rows, 2, 2, dtype=dtype).mT, torch.randn(rows, 4, dtype=torch.bfloat16)
        residual, steps = torch.rand(rows, dtype=dtype), torch.randint(0, 9, (rows,))
        history = torch.rand(longest, rows, dtype=dtype)
        wanted = [state, features, residual, steps, history]
        if answers is None:
            answers = Answers(lot, [tensor.clone() for tensor in wanted])
        else:
            answers.write(wanted)
        first, second = answers.copies(), answers.copies()
        for copies in (first, second):
            for copy, given in zip(copies, wanted, strict=True):
                assert (copy.dtype, copy.stride()) == (given.dtype, given.stride())
                assert torch.equal(copy, given)
        first[0].add_(1)  # a copy, and no one else's
        assert torch.equal(second[0], state)
    assert answers is not None
    third = answers.copies()
    third[2].add_(1)
    assert third[0]._version == 0  # an answer changed in place changes no other that has a tape
    assert answers._alone[0].holds(third[0])
    answers.forget()
    assert not answers._alone[0].holds(third[0])
    second = answers.copies()
    assert answers._alone[0].holds(second[0])  # as a backward pass may want to know
    assert not answers._alone[0].holds(first[0])


def test_an_answer_that_nobody_else_has_is_a_buffer_itself() -> None:
    shared = SharedBuffers()
    seen, base = torch.ones(2, 3), torch.ones(4, 5)
    leaf = torch.ones(3, 3, requires_grad=True)
    answer = [torch.ones(2, 2), seen, base[:2], base.detach()[2:], leaf.detach(), torch.ones(6, 2).mT, torch.ones(1, 2)]
    places = [tensor.data_ptr() for tensor in answer]
    answers = Answers(shared.lot(), answer)
    kept = [answers._alone[k].tensor.data_ptr() == place for k, place in enumerate(places)]
    assert kept == [True, False, False, False, False, False, True]  # a view of what is gone has still a base
    # Another solve finds buffers there, and copies what it has into them.
    again = [torch.full((2, 2), 5.0), torch.full((1, 2), 6.0)]
    other = Answers(shared.lot(), again)
    assert other._alone[0] is answers._alone[0]
    assert answers._alone[0].tensor.tolist() == [[5, 5], [5, 5]]
    assert [float(tensor.sum()) for tensor in other.copies()] == [20, 12]


def test_an_answer_that_a_solve_writes_at_one_place_is_a_buffer_itself() -> None:
    shared = SharedBuffers()
    kept, seen = torch.ones(2, 3), torch.ones(3, 3)
    answers = Answers(shared.lot(), [kept, seen, torch.ones(1, 2)], [kept])
    assert answers._alone[0].tensor is kept
    assert answers._alone[1].tensor is not seen
    kept.fill_(4)  # by the next run
    first = answers.copies()
    assert float(first[0].sum()) == 24
    lent = answers.copies(lend=True)[0]
    answers.forget()  # before the run after that
    kept.fill_(5)
    assert float(lent.sum()) == float(first[0].sum()) == 24


def test_solves_share_buffers_of_a_form_and_none_of_their_own_twice() -> None:
    shared = SharedBuffers()
    one, other = shared.lot(), shared.lot()
    a, b, c = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3, 2).mT
    forward = one.filled([a, b, c])
    backward = other.filled([b, a])
    assert forward[0] is backward[0]
    assert forward[1] is backward[1]
    assert forward[0] is not forward[1]
    assert forward[2] not in forward[:2]
    assert forward[2].tensor.stride() == c.stride()
    assert torch.equal(backward[0].tensor, b)
    assert backward[0].holds(b)
    assert not backward[0].holds(a)


def test_buffers_go_with_the_last_solve_that_has_them() -> None:
    shared = SharedBuffers()
    held: list[Buffer] = shared.lot().filled([torch.zeros(5)])
    also = shared.lot().filled([torch.zeros(5)])
    assert len(shared._buffers) == 1
    held.clear()
    assert len(shared._buffers) == 1
    also.clear()
    gc.collect()
    assert len(shared._buffers) == 0


def test_what_lies_in_memory_of_earlier_graphs_is_forgotten_when_they_run() -> None:
    shared = SharedBuffers()
    given = torch.ones(2)
    early = shared.next_age()
    (own,) = shared.lot().filled([given])
    late = shared.next_age()
    other = shared.lot().take(torch.ones(3))
    other.captured = own.captured = True  # as if made while a graph was captured
    shared._youngest = late
    values = torch.zeros(3)
    fill([other], [values])
    shared.overwritten_by(late)  # the one that made it, or one that was captured after it
    assert other.holds(values)
    shared.overwritten_by(early)
    assert not other.holds(values)
    assert own.holds(given)  # which was there when both were captured
    other.captured = False
    fill([other], [values])
    shared.overwritten_by(early)
    assert other.holds(values)


def test_what_was_lent_is_copied_before_it_is_overwritten() -> None:
    shared = SharedBuffers()
    lot = shared.lot()
    (buffer,) = lot.filled([torch.arange(6.0).reshape(2, 3).mT])
    lent = buffer.lend()
    assert lent.data_ptr() == buffer.tensor.data_ptr()
    assert buffer.holds(lent)
    buffer.tensor.add_(0)  # as a graph may do, of which nothing is counted
    assert lent._version == 0
    copy = own(lent)
    assert copy.data_ptr() != lent.data_ptr()
    assert torch.equal(copy, lent)
    assert own(copy) is copy
    del lot
    key = next(iter(shared._buffers))
    del buffer
    gc.collect()
    buffer = shared._buffers[key]  # whoever has what was lent keeps it
    with torch.inference_mode():
        fill([buffer], [torch.zeros(3, 2).mT.contiguous().mT])
    assert not lent.is_inference()
    assert lent.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert lent.stride() == buffer.tensor.stride()
    assert lent.data_ptr() != buffer.tensor.data_ptr()
    assert own(lent) is lent
    assert not buffer.tensor.any()
    first = buffer.lend()
    second = buffer.lend()  # one at a time
    assert first.data_ptr() != second.data_ptr() == buffer.tensor.data_ptr()
    del second
    buffer.note(None)  # nobody has it, so nothing is copied
    assert own(first) is first


def test_answers_are_lent_where_that_is_asked_for() -> None:
    answers = Answers(SharedBuffers().lot(), [torch.zeros(2, 2), torch.zeros(2), torch.zeros(4, 2)])
    answers.write([torch.ones(2, 2), torch.ones(2), torch.ones(4, 2)])
    state, *_ = answers.copies(lend=True)
    assert state.data_ptr() == answers._alone[0].tensor.data_ptr()
    with torch.inference_mode():
        other, *_ = answers.copies(lend=True)
    assert other.data_ptr() != answers._alone[0].tensor.data_ptr()
    answers.forget()
    answers._alone[0].tensor.zero_()
    assert state.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("tuples", [False, True])
def test_where_a_run_stands_is_brought_to_one_place(tuples: bool) -> None:
    def finish(taken: int, room: Tensor | None = None) -> Finish:
        parts = torch.full((3, 4), float(taken)), torch.full((3, 2), taken + 0.5)
        rows = [torch.full((3,), taken, dtype=dtype) for dtype in (torch.float64, torch.int64, torch.int64)]
        trace = torch.full((taken + 1, 3), float(taken)) if room is None else room[: taken + 1]
        return Finish(parts if tuples else parts[0], *rows, trace, room)

    first = finish(0)
    settled = _Settled(first, longest=6)
    place = settled.finish
    assert place.trace.shape == (6, 3)
    for taken in (0, 5, 2):
        now = finish(taken)
        settled.take(now)
        points = zip(*((end.point if tuples else [end.point]) for end in (place, now)), strict=True)
        pairs = [*points, (place.residual, now.residual), (place.steps, now.steps), (place.codes, now.codes)]
        for mine, other in (*pairs, (place.trace[: taken + 1], now.trace)):
            assert torch.equal(mine, other)
            assert mine.data_ptr() != other.data_ptr()  # what a run holds may be an input, and is not written to
    assert settled.finish is place
    # A run that leaves everything where it is needs no copies.
    room = torch.arange(18.0).reshape(6, 3)
    fixed = finish(1, room)
    settled = _Settled(fixed, longest=6)
    settled.take(fixed)
    assert settled.finish.trace is room
    assert settled.finish.residual is fixed.residual

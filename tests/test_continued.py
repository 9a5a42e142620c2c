"""Captured solves whose end the device finds, and what is told of them late, on a device that is played by a queue.

What graphs with forks compute is tested on a GPU (test_fast_paths_gpu.py).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import os
import pickle
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import opteq
from all_cases import CASES
from opteq import _watch
from opteq._errors import ConvergenceError, ConvergenceWarning
from opteq._watch import Finding, Watch
from opteq.gradients.base import Record
from opteq.problems.hidden import BoundMap
from opteq.solvers import Outcome, Solver, Status, branching, continued, expectation
from opteq.solvers.branching import GraphRefusedError
from opteq.solvers.buffers import SharedBuffers
from opteq.solvers.capture import Workshop
from opteq.solvers.continued import ContinuedSolve, ends
from opteq.solvers.expectation import Expectation
from opteq.solvers.loop import Finish
from opteq.solvers.stages import Stage
from opteq.solvers.trace import LateTrace, read_trace
from opteq.states import State, single


class Way:
    """What a way through a graph does when it is run."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def then(self, captured: Callable[[], None]) -> None:
        self.work.append(captured)

    def fork(self, flags: Tensor) -> tuple[Way, Way]:
        one, other = Way(), Way()
        self.work.append(lambda: (one if flags.any() else other).run())
        return one, other

    def run(self) -> None:
        for each in self.work:
            each()


class Graph:
    """A graph whose device works at once."""

    refused = False

    def __init__(self, device: torch.device) -> None:
        del device
        self.start = Way()

    def finished(self) -> Graph:
        if Graph.refused:
            raise GraphRefusedError("no more of them")
        return self

    def replay(self) -> None:
        self.start.run()


class Late:
    """Numbers that arrive when ``there`` says so."""

    there = True

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers.tolist()
        self.waited = False

    def arrived(self) -> bool:
        return Late.there

    def read(self) -> list[int]:
        self.waited = True
        return self.numbers


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(continued, "BranchingGraph", Graph)
    monkeypatch.setattr(continued, "Sent", Late)
    monkeypatch.setattr(_watch, "Sent", Late)
    monkeypatch.setattr(Graph, "refused", False)
    monkeypatch.setattr(Late, "there", True)
    yield
    gc.collect()


class Solve:
    """A continued solve of three rows, each of which ends after a number of steps that its batch says."""

    def __init__(self, histories: list[int], looks: bool = True) -> None:
        self.batch = torch.zeros(3, dtype=torch.int64)
        self.at = -1
        self.ran = 0  # stages since the solve began
        self.read = self.settled = -1
        made: ContinuedSolve = object.__new__(ContinuedSolve)
        made.looks, made.device, made.age = looks, torch.device("cpu"), 1
        made.plans, made.expectation, made.calls, made.sent = OrderedDict(), Expectation(), 0, None
        made.inputs = []
        made.workshop = SimpleNamespace(buffers=SimpleNamespace(overwritten_by=lambda age: None))  # type: ignore[assignment]
        made.answer = SimpleNamespace(forget=lambda: None, copies=self.copies)  # type: ignore[assignment]
        made.flags = [torch.ones(3, dtype=torch.int32) for _ in histories]
        made.stages = [Stage(self.steps(k), self.settle(k), taken) for k, taken in enumerate(histories)]
        made.conclusion = self.conclude
        self.made = made

    def steps(self, place: int) -> Callable[[], None]:
        def work() -> None:
            if place == 0:
                self.at, self.ran = -1, 0
            assert self.at == place - 1
            self.at, self.ran = place, self.ran + 1
            self.made.flags[place].copy_(self.batch > self.made.stages[place].history - 1)

        return work

    def settle(self, place: int) -> Callable[[], None]:
        def work() -> None:
            assert self.at == place
            assert self.settled == -1
            self.settled = place

        return work

    def conclude(self) -> None:
        self.read, self.settled = self.settled, -1

    def copies(self, lend: bool) -> list[Tensor]:
        assert not lend
        most = self.made.stages[-1].history - 1
        steps = self.batch.clamp(max=most)
        return [torch.tensor(self.read), torch.zeros(3), steps, torch.zeros(3), torch.arange(most + 1.0)[:, None]]

    def __call__(self, batch: list[int]) -> tuple[int, int, Tensor]:
        """The stage whose answer was read, how many ran, and the history."""
        self.batch = torch.tensor(batch)
        self.read = -1
        place, *_, history = self.made([], None)
        return int(place), self.ran, read_trace(history)


class Recorder:
    """A workshop where work is done at once, and recorded as what has been done."""

    def __init__(self) -> None:
        self.buffers = SharedBuffers()
        self.recorded: list[Callable[[], None]] = []

    def entered(self) -> nullcontext[None]:
        return nullcontext()

    def record(self, work: Callable[[], object], keep: bool) -> tuple[Callable[[], None], object]:
        assert keep
        self.recorded.append(lambda: None)
        return self.recorded[-1], work()


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_solve_is_recorded_with_one_end_before_its_steps(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(Workshop, "here", lambda device: recorder)
    solver = opteq.Picard(tol=1e-12, max_steps=most)
    concluded = []

    class Halved:
        facts = "known"
        lasting = ()

        def __init__(self, x: Tensor) -> None:
            self.session = solver.open(lambda y: 0.5 * single(y) + x, torch.zeros_like(x))
            self.run = self.session.run

        def tensors(self, finish: Finish) -> list[Tensor]:
            concluded.append(len(recorder.recorded))
            outcome = self.session.outcome(finish)
            return [single(outcome.state), outcome.residual, outcome.steps, outcome.codes, outcome.trace]

    with torch.no_grad():
        solve = ContinuedSolve([torch.ones(2, 3)], lambda given: Halved(given[0]))
    # The start, where it stands, the end; then steps and where they stand, each recorded once.
    assert concluded == [3]
    assert solve.conclusion is recorder.recorded[2]
    assert [stage.history for stage in solve.stages] == list(range(1, most + 2))
    assert len(recorder.recorded) == 3 + 2 * most
    assert len(solve.flags) == most + 1
    assert solve.facts == "known"
    assert solve.plans  # put together once it is recorded
    assert solve.answer is not None
    assert [tensor.shape for tensor in solve.answer.copies()] == [(2, 3), (2,), (2,), (2,), (most + 1, 2)]


@pytest.mark.parametrize("histories", [[1], [1, 2], [1, 2, 3, 4, 5, 6, 7], [1, 3, 7, 15, 31], list(range(1, 40))])
def test_a_solve_ends_where_no_row_is_left_or_at_the_last_step(histories: list[int]) -> None:
    most = histories[-1] - 1
    for seed in range(5):
        chance, solve = random.Random(seed), Solve(histories)
        for _ in range(60):
            batch = [chance.randint(0, most + 3) for _ in range(3)]
            place, _, history = solve(batch)
            needed = min(max(batch), most)
            assert histories[place] > needed or place == len(histories) - 1
            assert history.flatten().tolist() == list(range(needed + 1))
            Late.there = chance.random() < 0.5


def test_a_solve_that_is_expected_right_runs_no_more_than_it_needs() -> None:
    solve = Solve(list(range(1, 31)))
    ran = [solve([4, 2, 1])[1] for _ in range(4)]
    assert ran == [5, 5, 5, 5]  # the start and four steps, even when nothing was known
    assert list(solve.made.plans) == [0, 4]
    assert solve([6, 0, 0])[:2] == (6, 7)  # longer ones go on by themselves
    assert solve([7, 0, 0])[:2] == (8, 9)
    assert solve([2, 0, 0])[:2] == (4, 5)  # shorter ones do not end before the plan does


def test_what_is_expected_follows_batches_that_have_changed_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued, "_SEEN_EVERY", 1)
    solve = Solve(list(range(1, 31)))
    for length in (4, 9, 2):
        for _ in range(60):
            place, ran, _ = solve([length, 0, 0])
        assert (place, ran) == (length, length + 1)
    assert len(solve.made.plans) <= continued._MOST_PLANS
    Late.there = False  # a host that is far ahead learns nothing, and waits for nobody
    for _ in range(60):
        assert solve([5, 0, 0])[0] == 6
    assert solve.made.sent is not None
    assert not solve.made.sent.waited  # type: ignore[attr-defined]


def test_no_more_plans_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued, "_SEEN_EVERY", 1)
    solve = Solve(list(range(1, 31)))
    with monkeypatch.context() as patch:
        patch.setattr(Graph, "refused", True)
        with pytest.raises(GraphRefusedError):
            solve([4, 4, 4])
    solve([4, 4, 4])
    monkeypatch.setattr(Graph, "refused", True)
    for length in [4] * 9 + [8] * 9:
        place, _, history = solve([length, 0, 0])
        assert place >= length
        assert len(history) == length + 1
    assert len({id(plan) for plan in solve.made.plans.values()}) == 1


def test_a_solve_of_fixed_length_has_no_forks() -> None:
    solve = Solve([1, 21], looks=False)
    for _ in range(3):
        place, ran, history = solve([3, 3, 3])
        assert (place, ran, len(history)) == (1, 2, 21)
    assert solve.made.sent is None


@pytest.mark.parametrize(("place", "last"), [(0, 0), (0, 1), (3, 3), (5, 3), (0, 100), (7, 100), (99, 100)])
def test_the_device_looks_ever_less_often(place: int, last: int) -> None:
    found = ends(place, last)
    assert found[0] == min(place, last)
    assert found[-1] == last
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(gap >= 1 for gap in gaps)
    assert gaps[:2] == [1, 1][: len(gaps)]
    assert len(found) <= 9


def test_an_expectation_is_not_shaken_by_a_few() -> None:
    mind = Expectation()
    assert mind.length is None
    for seen in [6, 7, 7, 6, 5, 6, 8, 8, 6] * 5:
        mind.saw(seen)
        assert mind.length == 6
    for seen in (8, 7, 9):
        mind.saw(seen)
    assert mind.length == 8
    for _ in range(2 * expectation._PATIENCE - 1):  # twice as hard to convince from now on
        mind.saw(3)
        assert mind.length == 8
    mind.saw(3)
    assert mind.length == 3


def test_a_late_trace_is_as_long_as_the_longest_solve() -> None:
    room = torch.arange(10.0)[:, None].expand(-1, 2)
    assert read_trace(LateTrace(room, torch.tensor([3, 1]))).shape == (4, 2)
    assert read_trace(LateTrace(room[:, :0], torch.zeros(0, dtype=torch.int64))).shape == (1, 0)
    assert read_trace(room) is room


def test_there_are_no_forks_without_a_gpu() -> None:
    assert not branching.available(torch.device("cpu"))


def finding(codes: list[Status], way: str = "forward", late: bool = True, x: Tensor | None = None) -> Finding:
    size = len(codes)
    history = torch.zeros(5, size)
    steps = torch.ones(size, dtype=torch.int64)
    report = opteq.Report(
        "Anderson", torch.full((size,), 0.5), steps, torch.tensor(codes), 1e-4,
        LateTrace(history, steps) if late else history,
    )  # fmt: skip
    assert report.late == late
    return Finding(report, f"{way} failed", way, x)


FAILED, FINE = [Status.CONVERGED, Status.MAX_STEPS], [Status.CONVERGED, Status.APPROXIMATE]


def test_what_is_known_is_told_at_once_and_what_is_late_when_it_has_arrived() -> None:
    watch = Watch()
    with pytest.warns(ConvergenceWarning, match="1 of 2 samples: forward failed"):
        watch.judge(finding(FAILED, late=False), "warn")
    Late.there = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.judge(finding(FAILED, late=False), "warn")  # it has warned
        watch.judge(finding(FINE, "backward"), "warn")
        watch.judge(finding(FAILED, "backward"), "warn")
        watch.judge(finding(FAILED, "backward"), "ignore")
        watch.catch_up("warn")
    Late.there = True
    with pytest.warns(ConvergenceWarning, match="backward failed"):
        watch.catch_up("warn")
    with pytest.raises(ConvergenceError, match="forward failed"):
        watch.judge(finding(FAILED), "raise")


def test_the_way_back_waits_for_the_way_forward_and_no_longer() -> None:
    watch = Watch()
    Late.there = False
    watch.judge(finding(FINE, "backward"), "warn")
    watch.judge(finding(FAILED), "warn")
    watch.judge(finding(FAILED, "backward"), "warn")
    with pytest.warns(ConvergenceWarning, match="forward failed"):
        watch.catch_up("warn", wait_for="forward")
    assert [unseen.finding.way for unseen in watch._unseen] == ["backward"]
    watch._unseen.clear()


def test_few_reports_are_on_their_way_at_a_time() -> None:
    watch = Watch()
    Late.there = False
    for _ in range(_watch._MOST_UNSEEN):
        watch.judge(finding(FAILED), "warn")
    with pytest.warns(ConvergenceWarning, match="forward failed"):
        watch.judge(finding(FINE), "warn")
    assert len(watch._unseen) == _watch._MOST_UNSEEN
    watch._unseen.clear()


def test_a_layer_that_is_gone_has_its_last_words() -> None:
    watch = Watch()
    watch.judge(finding(FAILED), "warn")
    with pytest.warns(ConvergenceWarning, match="forward failed"):
        del watch


@pytest.mark.parametrize("late", [True, False])
def test_an_input_that_is_not_finite_is_named(late: bool) -> None:
    watch, x = Watch(), torch.ones(2, 3)
    x[1, 2] = torch.inf
    lost = finding([Status.CONVERGED, Status.NON_FINITE], late=late, x=x)

    def look(watch: Watch, found: Finding) -> None:
        watch.judge(found, "warn")
        watch.catch_up("warn")

    words = r"the input.* has 1 values that are not finite, the first at index \(1, 2\)"
    with pytest.warns(ConvergenceWarning, match=words):
        look(watch, lost)
    with pytest.raises(ValueError, match=words):
        watch.judge(lost, "raise")
    blameless = finding([Status.CONVERGED, Status.NON_FINITE], late=late, x=torch.ones(2, 3))
    with pytest.warns(ConvergenceWarning, match="NON_FINITE"):
        look(Watch(), blameless)


def test_an_input_that_was_overwritten_since_is_not_blamed() -> None:
    watch, x = Watch(), torch.ones(2, 3)
    Late.there = False
    watch.judge(finding([Status.CONVERGED, Status.NON_FINITE], x=x), "warn")
    x[1, 2] = torch.inf  # the next batch, in the same memory
    Late.there = True
    with pytest.warns(ConvergenceWarning, match="NON_FINITE"):
        watch.catch_up("warn")


def test_an_input_of_inference_mode_is_named() -> None:
    watch = Watch()
    with torch.inference_mode():
        x = torch.full((2, 3), torch.nan)
    watch.judge(finding([Status.NON_FINITE] * 2, x=x), "warn")
    with pytest.warns(ConvergenceWarning, match="has 6 values that are not finite"):
        watch.catch_up("warn")


def test_the_tape_of_an_input_is_not_kept() -> None:
    watch, x = Watch(), torch.ones(2, 3, requires_grad=True) * 2
    watch.judge(finding(FINE, x=x), "warn")
    kept = watch._unseen[0].finding.x
    assert isinstance(kept, Tensor)
    assert kept.grad_fn is None


def test_what_is_to_be_ignored_for_a_while_is_told_afterwards() -> None:
    watch = Watch()
    watch.judge(finding(FAILED), "warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.catch_up("ignore", wait_for="forward")
    with pytest.warns(ConvergenceWarning, match="forward failed"):
        watch.catch_up("warn")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda watch: pickle.loads(pickle.dumps(watch))])
def test_a_copy_knows_of_nothing_and_has_last_words_of_its_own(duplicate: Callable[[Watch], Watch]) -> None:
    watch = Watch()
    watch.judge(finding(FAILED), "warn")
    other = duplicate(watch)
    assert not other._unseen
    other.judge(finding(FAILED, "backward"), "warn")
    with pytest.warns(ConvergenceWarning, match="backward failed"):
        del other
    watch._unseen.clear()
    layer = opteq.Equilibrium(opteq.OptEq(opteq.operators.Dense(2, 3, bound=0.9)))
    assert copy.deepcopy(layer)._watch is not layer._watch


def test_many_threads_judge_at_once() -> None:
    watch = Watch()

    def work() -> None:
        for _ in range(200):
            watch.judge(finding(FINE), "warn")
            watch.catch_up("warn", wait_for="forward")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert not watch._unseen


def test_last_words_are_not_for_other_processes_nor_failed_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = deque([_watch._Unseen(finding(FAILED))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _watch._last_words(unseen, set(), os.getpid() + 1)

        def lost(self: Late) -> list[int]:
            raise RuntimeError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(Late, "read", lost)
        _watch._last_words(unseen, set(), os.getpid())


class Doubling(opteq.Equilibrium):
    """A layer with another idea of what a solution is."""

    def solve(self, x: State, start: State | None = None) -> opteq.Solution:
        solution = super().solve(x, start)
        return dataclasses.replace(solution, features=2 * single(solution.features))


def test_a_solve_of_ones_own_is_used_by_a_call() -> None:
    problem = opteq.OptEq(opteq.operators.Dense(2, 3, bound=0.9), torch.nn.Linear(2, 3))
    x = torch.ones(1, 2)
    torch.testing.assert_close(Doubling(problem)(x), 2 * opteq.Equilibrium(problem)(x))


@pytest.mark.parametrize("name", ["opteq-relu", "mopteq-two", "mopteq-sign", "parallel", "popteq-sum"])
def test_codes_are_looked_at_only_for_problems_that_have_more_to_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at them makes a device wait for the solve."""
    (case,) = (case for case in CASES if case.name == name)
    looked: list[int] = []
    monkeypatch.setattr("opteq.equilibrium.any_row", lambda mask: bool(looked.append(1)) or bool(mask.any()))
    problem, x = case.problem(), case.input()
    opteq.Equilibrium(problem, on_failure="ignore")(x)
    hidden = problem(x)
    assert bool(looked) == (hidden.diagnoses and not hidden.jumps)
    assert hidden.diagnoses == hidden.jumps  # of these


class Noting(opteq.Implicit):
    """A gradient that counts how often it is asked."""

    asked: ClassVar[list[int]] = []

    def run(self, hidden: BoundMap, solver: Solver, start: State | None, record: Record) -> tuple[State, Outcome]:
        self.asked.append(1)
        return super().run(hidden, solver, start, record)


def test_a_gradient_of_ones_own_is_used_by_a_call() -> None:
    problem = opteq.OptEq(opteq.operators.Dense(2, 3, bound=0.9), torch.nn.Linear(2, 3))
    layer = opteq.Equilibrium(problem, gradient=Noting())
    layer(torch.ones(1, 2))
    layer.solve(torch.ones(1, 2))
    assert Noting.asked == [1, 1]

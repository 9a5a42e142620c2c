"""A slice of the hunt with fixed seeds, on both paths; and known faults, which the hunt has to find."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opteq
import opteq.models
from hunt import exports, files, oracle, problems
from hunt.__main__ import main
from hunt.drawing import Draw, FailureError
from hunt.run import KINDS, PATHS, Case, Tally, total
from opteq.inference import export as exporting
from opteq.inference import formats
from opteq.models.pretrained import weights
from opteq.problems.certificate import Certificate
from opteq.states import map_state

SEED = 20261117
SLICES = {"problems": 40, "gradients": 10, "certificates": 20, "files": 20, "recipes": 20}
PIECE = 5
"""Cases of one test."""


def pieces() -> Iterator[Any]:
    """Cases are drawn without regard to the path, and both paths have one law: the quick run takes a piece each."""
    for kind in KINDS:
        paths = PATHS if kind in ("problems", "gradients") else PATHS[:1]
        for (place, path), first in itertools.product(enumerate(paths), range(0, SLICES[kind], PIECE)):
            later = len(paths) > 1 and first != place * PIECE
            yield pytest.param(
                kind, path, first, id=f"{kind}-{path}-{first}", marks=[pytest.mark.slow] if later else []
            )


@pytest.mark.parametrize(("kind", "path", "first"), list(pieces()))
def test_nothing_fails(kind: str, path: str, first: int) -> None:
    for number in range(first, first + PIECE):
        case = Case(SEED, kind, path, number)
        _, failure = case.failure()
        assert failure is None, f"{failure}\n  again: make hunt SEED={case}"


def found_within(numbers: range, kind: str) -> bool:
    """Whether one of these cases fails."""
    return any(Case(SEED, kind, "plain", number).failure()[1] is not None for number in numbers)


def test_a_state_that_is_slightly_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = opteq.Equilibrium.solve

    def off(self: opteq.Equilibrium, x: torch.Tensor, start: object = None) -> opteq.Solution:
        found = solve(self, x, start)
        return dataclasses.replace(found, state=map_state(lambda part: 1.05 * part + 1e-3, found.state))

    monkeypatch.setattr(opteq.Equilibrium, "solve", off)
    assert found_within(range(4), "problems")


def test_a_saddle_that_is_called_converged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opteq.equilibrium.mark_non_minima", lambda hidden, state, codes, floor: codes)
    monkeypatch.setattr(problems, "FAMILIES", [problems.own.wells])
    assert found_within(range(40), "problems")


def test_eigenvalues_where_the_general_solver_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(4, 12, 12, generator=generator, dtype=torch.float64)
    slopes = 10 ** (-6 * torch.rand(4, 12, 1, generator=generator, dtype=torch.float64))
    slopes[:, :2] = torch.tensor([0.0, 1e-200], dtype=torch.float64)[:, None]  # off, and as good as off
    local = slopes * (M + M.mT)
    expected = np.sort(np.linalg.eigvals(local.numpy()).real)

    def give_up(_: torch.Tensor) -> torch.Tensor:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigvals", give_up)
    np.testing.assert_allclose(oracle.eigenvalues(local).sort().values.numpy(), expected, atol=1e-11)


def test_a_gradient_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from opteq.gradients.implicit import AdjointSystem

    solve = AdjointSystem.solve

    def off(self: AdjointSystem, gradient: object) -> object:
        vector, report = solve(self, gradient)
        return map_state(lambda part: (1 + 1e-5) * part, vector), report

    monkeypatch.setattr(AdjointSystem, "solve", off)
    assert found_within(range(8), "gradients")


def test_a_guarantee_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    certify = opteq.OptEq.certificate

    def bold(self: opteq.OptEq) -> Certificate:
        found = certify(self)
        return dataclasses.replace(found, contraction=found.contraction and found.contraction / 10)

    monkeypatch.setattr(opteq.OptEq, "certificate", bold)
    monkeypatch.setattr("hunt.certificates.FAMILIES", [problems.families.opteq_layer])
    assert found_within(range(4), "certificates")


def test_damaged_weights_that_load_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files._saved.cache_clear()
    monkeypatch.setattr(weights, "digest", lambda tensors: "none")
    try:
        assert found_within(range(200), "files")  # it ends at the first
    finally:
        files._saved.cache_clear()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_exported_file_with_other_logits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opteq.models.create("opteq-digits", num_classes=3, channels=3, hidden=[4]).eval()
    exports.exported(Draw("exported"), model, tmp_path, "torchscript")
    run = formats.run
    monkeypatch.setattr(exporting, "_compare", lambda *_: None)
    monkeypatch.setattr(formats, "run", lambda *given: run(*given) + 0.1)
    with pytest.raises(FailureError, match="its logits are off"):
        exports.exported(Draw("exported"), model, tmp_path, "torchscript")


def test_the_oracle_agrees_with_closed_forms() -> None:
    """OptEq with W = 1/2 and c = 1: y = 1 / (1 - w^2) = 4/3; its derivatives by c and w are 4/3 and 16/9."""
    w = {"W.weight": torch.tensor([[0.5]], dtype=torch.float64)}

    def inside(w: oracle.Weights, x: torch.Tensor, y: oracle.State) -> oracle.State:
        return (oracle.forward(w["W.weight"], oracle.backward(w["W.weight"], y[0])) + x,)

    equations = oracle.Equations(
        inside,
        lambda w, x, y: (oracle.ACTIVATIONS["relu"](inside(w, x, y)[0]),),
        lambda w, x, y: y,
        [(1,)],
        (0.0,),
        lambda w: 0.25,
        lambda w, x: x.norm(dim=1),
    )
    x = torch.ones(1, 1, dtype=torch.float64)
    y, found = oracle.polished(equations, w, x, (0.3 * x,))
    assert bool(found)
    assert float(y[0]) == pytest.approx(4 / 3, rel=1e-12)
    by_x, by_w = oracle.gradients(
        equations, w, x, y, lambda features: features[0].sum(), oracle.jacobian(equations, w, x, y)
    )
    assert float(by_x) == pytest.approx(4 / 3, rel=1e-12)
    assert float(by_w["W.weight"]) == pytest.approx(16 / 9, rel=1e-12)


def test_the_oracle_has_the_adjoint_of_a_convolution() -> None:
    weight, u = torch.randn(3, 2, 3, 3, dtype=torch.float64), torch.randn(4, 3, 2, 4, dtype=torch.float64)
    zero = torch.zeros(4, 2, 2, 4, dtype=torch.float64)
    (expected,) = torch.func.vjp(lambda v: oracle.forward(weight, v), zero)[1](u)
    torch.testing.assert_close(oracle.backward(weight, u), expected)


def test_a_hunt_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--minutes", "0.002", "--seed", "3", "--kinds", "recipes", "--folder", str(tmp_path)]
    counted = []
    for _ in range(2):
        assert main(arguments) == 0
        (path,) = tmp_path.glob("*.json")
        counted.append(json.loads(path.read_text())["next"]["recipes/plain"])
    assert counted[1] > counted[0] > 0
    (tmp_path / "kills-seed3-0.json").write_text(json.dumps({"kills": 4, "runs": 2, "different": 0}))
    assert f"recipes: {counted[1]}, {counted[1]} of them checked\n" in total(tmp_path)
    assert "kills: 4 in 2 trainings, 0 with other bytes" in total(tmp_path)
    assert main(["--seed", "3/recipes/plain/0"]) == 0
    assert "3/recipes/plain/0: " in capsys.readouterr().out


def test_a_failure_is_reported_with_what_reproduces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(draw: object) -> str:
        raise FailureError("this is wrong")

    monkeypatch.setattr("hunt.recipes.hunt", wrong)
    assert main(["--minutes", "0", "--kinds", "recipes", "--seed", "5", "--folder", str(tmp_path)]) == 1
    assert "again: make hunt SEED=5/recipes/plain/0" in capsys.readouterr().out
    assert main(["--seed", "5/recipes/plain/0"]) == 1


@pytest.mark.parametrize(
    ("missing", "verdict"), [("scipy.linalg", "skipped: no scipy.linalg"), ("opteq.kernel", "failed")]
)
def test_a_package_that_is_missing_is_no_failure(missing: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wanting(draw: object) -> str:
        raise ModuleNotFoundError(f"no {missing}", name=missing)

    monkeypatch.setattr("hunt.recipes.hunt", wanting)
    assert Case(5, "recipes", "plain", 0).failure()[0] == verdict


@pytest.mark.slow
def test_trainings_survive_kills(tmp_path: Path) -> None:
    assert main(["--kills", "6", "--folder", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "kills-seed0-0.json").read_text())
    assert found["kills"] >= 6
    assert found["runs"] >= 2  # of a classifier and of a denoiser


@pytest.mark.slow
def test_two_processes_have_cases_of_their_own(tmp_path: Path) -> None:
    options = ["--processes", "2", "--minutes", "0.01", "--kinds", "recipes", "--folder", str(tmp_path)]
    assert main(options) == 0
    numbers = {json.loads(path.read_text())["next"]["recipes/plain"] // 10**7 for path in tmp_path.glob("*.json")}
    assert numbers == {0, 1}


def test_a_sum_says_how_many_failures_it_leaves_out(tmp_path: Path) -> None:
    tally = Tally(1, 0, "cpu", failed={f"1/problems/plain/{number}": "wrong" for number in range(33)})
    tally.write(Tally.path(tmp_path, 1, 0, "cpu"))
    lines = total(tmp_path).splitlines()
    assert sum("SEED=1/problems/plain/" in line for line in lines) == 30
    assert lines[-1].strip() == "and 3 more that failed"

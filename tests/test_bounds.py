"""The paper's propositions: random trials look for violations; known counterexamples break the printed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opteq.analysis import bounds
from opteq.kernels.gaussian import DIP


def matrices(trials: int, rows: int, columns: int, norm: float, generator: torch.Generator) -> Tensor:
    """Random matrices with spectral norms up to ``norm``, most of them close to it."""
    A = torch.randn(trials, rows, columns, generator=generator, dtype=torch.float64)
    largest = torch.linalg.matrix_norm(A, 2)[:, None, None]
    share = torch.rand(trials, 1, 1, generator=generator, dtype=torch.float64) ** 0.25
    return norm * share * A / largest


def geq(W: Tensor, c: Tensor, gamma: Tensor | float, steps: int = 3000) -> tuple[Tensor, Tensor]:
    """Equilibria of many problems at once, ``W`` of shape (T, k, n) and ``c`` (T, k), and their weights e."""
    gamma = torch.as_tensor(gamma, dtype=torch.float64).reshape(-1, 1)
    z = torch.zeros(W.shape[0], W.shape[2], dtype=torch.float64)
    damping = 2 / (2 + torch.linalg.matrix_norm(W, 2)[:, None] ** 2 * (1 - DIP))
    for _ in range(steps):
        r = c - (W @ z[:, :, None])[:, :, 0]
        e = torch.exp(-gamma * r.square().sum(1, keepdim=True))
        moved = damping * (torch.relu(e * (W.mT @ r[:, :, None])[:, :, 0]) - z)
        z = z + moved
        if float(moved.abs().max()) < 1e-14:
            break
    return z, e[:, 0]


def opteq(W: Tensor, c: Tensor, steps: int = 3000) -> Tensor:
    """Equilibria of ``z = relu(W'W z + c)``, ``W`` of shape (T, k, n) and ``c`` (T, n)."""
    z = torch.zeros_like(c)
    for _ in range(steps):
        moved = torch.relu((W.mT @ (W @ z[:, :, None]))[:, :, 0] + c) - z
        z = z + moved
        if float(moved.abs().max()) < 1e-14:
            break
    return z


def apply(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x[:, :, None])[:, :, 0]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# Facts about an equilibrium


def test_facts_about_an_equilibrium(generator: torch.Generator) -> None:
    W = matrices(2000, 4, 3, 1.2, generator)
    c = 2 * torch.randn(2000, 4, generator=generator, dtype=torch.float64)
    gamma = 10 ** (3 * torch.rand(2000, generator=generator, dtype=torch.float64) - 2)
    z, e = geq(W, c, gamma)
    image = apply(W, z)
    r, size, norm = c - image, z.norm(dim=1), torch.linalg.matrix_norm(W, 2)
    assert (e * (image * r).sum(1) >= size**2 - 1e-10).all()
    assert (r.norm(dim=1) <= c.norm(dim=1) + 1e-10).all()
    assert (size <= torch.minimum(e * norm, e.sqrt() / 2) * c.norm(dim=1) + 1e-10).all()


# Proposition 1


def test_features_reproduce_the_kernel(generator: torch.Generator) -> None:
    a, b = torch.randn(2, 50, 3, generator=generator, dtype=torch.float64)
    gamma = 0.4
    features = [bounds.feature_map(v, gamma, 6) for v in (a, b)]
    assert features[0].shape == (50, sum(3**i for i in range(7)))
    scale = torch.exp(-gamma * (a.square().sum(1) + b.square().sum(1)))
    truncated = bounds.truncated_kernel(a, b, gamma, 6)
    torch.testing.assert_close(scale * (features[0] * features[1]).sum(1), truncated.value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", [0, 1, 3, 8, 40])
def test_what_is_left_out_stays_within_its_bound(order: int, generator: torch.Generator) -> None:
    a, b = 1.5 * torch.randn(2, 5000, 4, generator=generator, dtype=torch.float64)
    gamma = 0.7
    truncated = bounds.truncated_kernel(a, b, gamma, order)
    exact = torch.exp(-gamma * (a - b).square().sum(1))
    gap = (truncated.value - exact).abs()
    assert (gap <= truncated.error * (1 + 1e-9) + 1e-12).all()
    if order == 3:
        assert (gap > 0.1 * truncated.error).any()  # or the bound would be idle
    printed = torch.exp(-gamma * (a.square().sum(1) + b.norm(dim=1)) + 2 * gamma * (a * b).sum(1))
    assert (printed - exact).abs().max() > 0.1  # the paper's scale has |b| for |b|^2


# Proposition 2


def sensitivity_trials(generator: torch.Generator, trials: int = 3000) -> dict[str, Tensor]:
    """Weights, changed weights and inputs, all within mu = 0.9 and B = 1.5, with the largest change of a matrix."""
    mu, radius = 0.9, 1.5
    found: dict[str, Tensor] = {}
    for name, shape in {"W": (3, 3), "U": (3, 2), "W_c": (2, 3)}.items():
        found[name] = matrices(trials, *shape, mu, generator)
        noise = matrices(trials, *shape, 0.05, generator)
        changed = found[name] + noise
        norm = torch.linalg.matrix_norm(changed, 2)[:, None, None]
        found[name + "'"] = changed * (mu / norm).clamp(max=1)
    for name, size in {"b": 3, "b_c": 2}.items():
        found[name] = matrices(trials, size, 1, mu, generator)[:, :, 0]
        changed = found[name] + matrices(trials, size, 1, 0.05, generator)[:, :, 0]
        found[name + "'"] = changed * (mu / changed.norm(dim=1, keepdim=True)).clamp(max=1)
    found["x"] = matrices(trials, 2, 1, radius, generator)[:, :, 0]
    changes = [torch.linalg.matrix_norm(found[n + "'"] - found[n], 2) for n in ("W", "U", "W_c")]
    changes += [(found[n + "'"] - found[n]).norm(dim=1) for n in ("b", "b_c")]
    found["change"] = torch.stack(changes).amax(dim=0)
    return found


def predictions(w: dict[str, Tensor], mark: str, gamma: Tensor | None) -> tuple[Tensor, Tensor | None]:
    c = apply(w["U" + mark], w["x"]) + w["b" + mark]
    z, e = (opteq(w["W" + mark], c), None) if gamma is None else geq(w["W" + mark], c, gamma)
    return apply(w["W_c" + mark], z) + w["b_c" + mark], e


SIZES = bounds.WeightSizes(mu=0.9, m=0.81, squares=4.0, width=8)


def test_opteq_predictions_move_no_further_than_proved(generator: torch.Generator) -> None:
    w = sensitivity_trials(generator)
    moved = (predictions(w, "'", None)[0] - predictions(w, "", None)[0]).norm(dim=1)
    bound = bounds.opteq_sensitivity(SIZES, radius=1.5)
    assert bound.proved
    assert (moved <= bound.value * w["change"] * (1 + 1e-9)).all()


def test_geq_predictions_move_no_further_than_proved(generator: torch.Generator) -> None:
    w = sensitivity_trials(generator)
    gamma = 10 ** (3 * torch.rand(3000, generator=generator, dtype=torch.float64) - 2)
    (before, e), (after, _) = (predictions(w, mark, gamma) for mark in ("", "'"))
    moved = (after - before).norm(dim=1) / w["change"]
    bound = bounds.geq_sensitivity(SIZES, radius=1.5, beta=1.0)
    assert bound.proved
    assert (moved <= bound.value * (1 + 1e-9)).all()
    # The same sample by sample with its own weight, that of the unchanged network.
    each = torch.tensor([bounds.geq_sensitivity(SIZES, 1.5, float(one)).value for one in e])
    assert (moved <= each * (1 + 1e-9)).all()
    assert moved.max() > bound.value / 5


def test_equation_33_is_violated_and_ours_is_not() -> None:
    """One unit with ``w = 0.9`` at ``gamma |r|^2 = 3/2``: a change of b by 1e-4."""
    w, gamma, change = 0.9, 1.0, 1e-4
    r = math.sqrt(1.5 / gamma)
    e = math.exp(-1.5)
    z = e * w * r
    c = torch.tensor([[r + w * z], [r + w * z + change]], dtype=torch.float64)
    states, _ = geq(torch.full((2, 1, 1), w, dtype=torch.float64), c, gamma)
    moved = float((states[1] - states[0]).abs())
    printed = e * w * change / (1 - e * w**2)
    ours = bounds.geq_lipschitz(w, 1.0).value * change
    assert moved == pytest.approx(6.3e-5, rel=0.02)
    assert printed == pytest.approx(2.5e-5, rel=0.03)
    assert printed < moved <= ours < 1.01 * moved


def test_sensitivities_of_the_paper() -> None:
    sizes = bounds.WeightSizes(mu=0.95, m=0.9025, squares=1.0, width=4)
    main = [bounds.geq_sensitivity(sizes, 1.0, 0.8, "main"), bounds.opteq_sensitivity(sizes, 1.0, "main")]
    appendix = [bounds.geq_sensitivity(sizes, 1.0, 0.8, "appendix"), bounds.opteq_sensitivity(sizes, 1.0, "appendix")]
    assert [bound.value for bound in main] == pytest.approx([18.0, 100.9], abs=0.05)
    assert [bound.value for bound in appendix] == pytest.approx([69.2, 400.7], abs=0.05)
    assert [bound.proved for bound in main + appendix] == [False, False, False, True]
    assert "keeps e fixed" in appendix[0].note
    # Remark 1: GEQ's bound is the smaller; the proved one is so without its hypothesis e < 0.8.
    assert bounds.geq_sensitivity(sizes, 1.0).value < appendix[0].value < appendix[1].value
    for mu in torch.linspace(0.01, 0.99, 50).tolist():
        for radius in (0.0, 1.0, 30.0):
            here = bounds.WeightSizes(mu, mu**2, 1.0, 4)
            assert bounds.geq_sensitivity(here, radius).value < bounds.opteq_sensitivity(here, radius).value
    assert bounds.geq_sensitivity(bounds.WeightSizes(0.9, 0.9, 1.0, 4), 1.0, beta=1.2, form="main").value == math.inf


def test_nothing_is_bounded_where_weights_do_not_contract() -> None:
    edge, x = bounds.WeightSizes(mu=1.0, m=1.0, squares=1.0, width=4), torch.ones(1, 2, dtype=torch.float64)
    for form in bounds.FORMS:
        assert bounds.opteq_sensitivity(edge, 0.0, form).value == math.inf
    for form in ("main", "appendix"):
        assert bounds.geq_sensitivity(edge, 1.0, 1.0, form).value == math.inf
    for w in (1.0, 1.5):
        assert bounds.opteq_similarity(x, x, 1.0, 3, w).tolist() == [math.inf]
    assert bounds.relu_similarity(x, 0 * x, 1.0, 3).tolist() == [0.0]


def test_gap_and_sizes() -> None:
    torch.manual_seed(0)
    W, U, W_c, b, b_c = (torch.randn(shape, dtype=torch.float64) for shape in [(3, 4), (4, 2), (5, 4), (4,), (5,)])
    sizes = bounds.WeightSizes.of(0.1 * W, 0.1 * U, 0.1 * b, 0.1 * W_c, 0.1 * b_c)
    assert sizes.width == 5
    assert sizes.m == pytest.approx(float(torch.linalg.svdvals(0.01 * W.T @ W)[0]))
    assert sizes.squares == pytest.approx(0.01 * sum(float((A**2).sum()) for A in (W, U, W_c, b, b_c)))
    sensitivity = bounds.opteq_sensitivity(sizes, 1.0)
    gap = bounds.generalization_gap(sensitivity, sizes, margin=0.5, samples=10_000, delta=0.05)
    inside = 16 * 5 * math.log(120) * sensitivity.value**2 * sizes.squares / (0.25 * 10_000) + math.log(2e7) / 10_000
    assert gap.value == pytest.approx(math.sqrt(inside))
    assert gap.proved
    printed = bounds.geq_sensitivity(sizes, 1.0, form="appendix")
    assert not bounds.generalization_gap(printed, sizes, 0.5, 10_000, 0.05).proved
    assert float(gap) == gap.value


# Proposition 3


@pytest.mark.parametrize("near", [1e-3, 1.0])
@pytest.mark.parametrize("mu", [0.5, 0.9, 1.4])
def test_geq_constants_are_never_exceeded(mu: float, near: float, generator: torch.Generator) -> None:
    trials, radius = 3000, 2.0
    W, U = matrices(trials, 3, 4, mu, generator), matrices(trials, 3, 2, mu, generator)
    x = matrices(trials, 2, 1, radius, generator)[:, :, 0]
    other = x + near * torch.randn(trials, 2, generator=generator, dtype=torch.float64)
    other = other * (radius / other.norm(dim=1, keepdim=True)).clamp(max=1)
    gamma = 10 ** (3 * torch.rand(trials, generator=generator, dtype=torch.float64) - 2)
    (z1, e1), (z2, e2) = (geq(W, apply(U, one), gamma) for one in (x, other))
    moved = (z1 - z2).norm(dim=1) / (x - other).norm(dim=1)
    for form in ("sharp", "simple"):
        bound = bounds.geq_lipschitz(mu, mu, form)
        assert bound.proved
        assert (moved <= bound.value * (1 + 1e-6)).all()
    for i in range(trials):
        # e of the pair stands for its largest value on the data, which is what the paper calls beta.
        beta = max(float(e1[i]), float(e2[i]))
        printed = bounds.geq_lipschitz_printed(mu, beta, float(gamma[i]), radius)
        assert float(moved[i]) <= printed.value * (1 + 1e-6)


def test_opteq_constant_is_never_exceeded_and_attained(generator: torch.Generator) -> None:
    W, U = matrices(3000, 3, 4, 0.9, generator), matrices(3000, 4, 2, 0.9, generator)
    x, other = torch.randn(2, 3000, 2, generator=generator, dtype=torch.float64)
    moved = (opteq(W, apply(U, x)) - opteq(W, apply(U, other))).norm(dim=1) / (x - other).norm(dim=1)
    assert (moved <= bounds.opteq_lipschitz(0.9, 0.9).value * (1 + 1e-9)).all()
    scalar = torch.full((2, 1, 1), 0.9, dtype=torch.float64)
    z = opteq(scalar, 0.9 * torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    assert float(z[1] - z[0]) == pytest.approx(bounds.opteq_lipschitz(0.9, 0.9).value)
    assert bounds.opteq_lipschitz(1.0, 1.0).value == math.inf


def test_the_conclusion_of_remark_2_always_holds_and_its_hypotheses_never() -> None:
    for mu in torch.linspace(0.01, 0.999, 400).tolist():
        simple, sharp = bounds.geq_lipschitz(mu, mu, "simple").value, bounds.geq_lipschitz(mu, mu).value
        assert sharp < simple < 0.464 * bounds.opteq_lipschitz(mu, mu).value
    # |r| <= |U x| < mu B < 1 and sqrt(gamma) < 0.2, so that e >= exp(-gamma |r|^2) > exp(-0.04) > 0.8.
    assert math.exp(-(0.2**2)) > 0.96


# Proposition 4


def opposite(trials: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, inputs, generator=generator, dtype=torch.float64)
    x = (x / x.norm()).expand(trials, -1)
    return x, -x


def test_relu_similarity_by_sampling(generator: torch.Generator) -> None:
    x1 = torch.tensor([[1.0, 0.5, -0.3]], dtype=torch.float64)
    x2 = torch.tensor([[0.2, -1.0, 0.4]], dtype=torch.float64)
    U = 0.7 * torch.randn(200_000, 5, 3, generator=generator, dtype=torch.float64)
    sampled = (torch.relu(apply(U, x1.expand(200_000, -1))) * torch.relu(apply(U, x2.expand(200_000, -1)))).sum(1)
    expected = bounds.relu_similarity(x1, x2, 0.49, 5)
    error = float(sampled.std()) / math.sqrt(200_000)
    assert abs(float(sampled.mean()) - float(expected)) < 5 * error
    assert float(expected) == pytest.approx(5 * float(bounds.relu_similarity(x1, x2, 0.49, 1)))


def test_the_opteq_bound_of_the_paper_is_false_and_ours_is_not(generator: torch.Generator) -> None:
    trials = 50_000
    W = torch.full((1, 2, 2), 0.45, dtype=torch.float64).expand(trials, -1, -1)
    U = torch.randn(trials, 2, 3, generator=generator, dtype=torch.float64)
    x1, x2 = opposite(trials, 3, generator)
    similarity = float((opteq(W, apply(U, x1), 300) * opteq(W, apply(U, x2), 300)).sum(1).mean())
    printed = float(bounds.relu_similarity(x1[:1], x2[:1], 1.0, 2)) / (1 - 0.9**2) ** 2
    assert printed == pytest.approx(0.0, abs=1e-6)
    assert similarity > 0.2
    assert similarity < float(bounds.opteq_similarity(x1[:1], x2[:1], 1.0, 2, 0.9))


def test_opteq_similarity_for_diagonal_weights(generator: torch.Generator) -> None:
    trials = 100_000
    roots = torch.tensor([0.3, 0.8, 0.6], dtype=torch.float64)
    U = torch.randn(trials, 3, 2, generator=generator, dtype=torch.float64)
    x1 = torch.tensor([[1.0, 0.2]], dtype=torch.float64)
    x2 = torch.tensor([[-0.3, 1.0]], dtype=torch.float64)
    W = torch.diag(roots).expand(trials, -1, -1)
    states = [opteq(W, apply(U, x.expand(trials, -1)), 500) for x in (x1, x2)]
    products = (states[0] * states[1]).sum(1)
    expected = float(bounds.opteq_similarity_diagonal(x1, x2, 1.0, roots**2))
    assert abs(float(products.mean()) - expected) < 5 * float(products.std()) / math.sqrt(trials)
    assert expected < float(bounds.opteq_similarity(x1, x2, 1.0, 3, 0.8))


def test_geq_similarity_holds_pair_by_pair_where_the_paper_says_zero(generator: torch.Generator) -> None:
    trials = 3000
    W, U = matrices(trials, 3, 3, 0.9, generator), torch.randn(trials, 3, 2, generator=generator, dtype=torch.float64)
    x1, x2 = opposite(trials, 2, generator)
    c1, c2 = apply(U, x1), apply(U, x2)
    (z1, e1), (z2, e2) = geq(W, c1, 0.05), geq(W, c2, 0.05)
    product = (z1 * z2).sum(1)
    assert (product <= bounds.geq_similarity(c1, c2, e1, e2, 0.9) + 1e-12).all()
    # The printed bound of the expectation is zero for opposite inputs; states are not negative: one sample refutes it.
    assert product.max() > 1e-4
    assert float(bounds.relu_similarity(x1[:1], x2[:1], 1.0, 1)) == pytest.approx(0.0, abs=1e-6)


def test_far_inputs_cannot_both_have_large_weights(generator: torch.Generator) -> None:
    trials = 5000
    W, U = matrices(trials, 3, 3, 0.9, generator), torch.randn(trials, 3, 2, generator=generator, dtype=torch.float64)
    x1, x2 = 2 * torch.randn(2, trials, 2, generator=generator, dtype=torch.float64)
    gamma = 0.2
    (z1, e1), (z2, e2) = geq(W, apply(U, x1), gamma), geq(W, apply(U, x2), gamma)
    for i in range(0, trials, 5):
        radius = max(float(z1[i].norm()), float(z2[i].norm()))
        least = float(torch.linalg.svdvals(U[i])[-1])
        norm = float(torch.linalg.matrix_norm(W[i], 2))
        bound = bounds.weight_product(x1[i : i + 1], x2[i : i + 1], gamma, least, norm, radius)
        assert float(e1[i] * e2[i]) <= float(bound) * (1 + 1e-9)


def test_the_exponent_gamma_is_violated() -> None:
    """``W`` close to zero, opposite inputs, U the identity: ``e1 e2 = exp(-2 gamma)`` while ``|x1 - x2|^2 = 4``."""
    gamma = 0.3
    W = torch.full((1, 1, 1), 1e-6, dtype=torch.float64)
    x = torch.ones(1, 1, dtype=torch.float64)
    (_, e1), (_, e2) = geq(W, x, gamma), geq(W, -x, gamma)
    product = float(e1 * e2)
    assert product <= float(bounds.weight_product(x, -x, gamma, 1.0, 1e-6, 1.0)) * (1 + 1e-9)
    for exponent in (1e-12, 2e-12):  # every D as printed is this close to 1
        assert product > 1.5 * math.exp(gamma * exponent - gamma * 4)


def test_half_of_gamma_is_violated_by_states_that_follow(generator: torch.Generator) -> None:
    """With ``gamma / 2`` even the corrected D fails on some pair."""
    trials, gamma = 20_000, 1.0
    W = matrices(trials, 1, 2, 0.99, generator)
    x1, x2 = 3 * torch.randn(2, trials, 1, generator=generator, dtype=torch.float64)
    (z1, e1), (z2, e2) = geq(W, x1, gamma), geq(W, x2, gamma)
    radius = torch.maximum(z1.norm(dim=1), z2.norm(dim=1))
    norm = torch.linalg.matrix_norm(W, 2)
    apart = (x1 - x2).square().sum(1)
    half = torch.exp(gamma * radius**2 * norm**2 - gamma / 2 * apart)
    quarter = torch.exp(gamma * radius**2 * norm**2 - gamma / 4 * apart)
    assert (e1 * e2 > half * (1 + 1e-6)).any()
    assert (e1 * e2 <= quarter * (1 + 1e-9)).all()


def test_the_threshold_of_remark_3_needs_gamma() -> None:
    gamma, radius, mu = 0.1, 5.0, 0.99
    x1 = torch.zeros(1, 1, dtype=torch.float64)
    least = 1.0
    far = torch.full((1, 1), bounds.separation(least, mu, radius), dtype=torch.float64)
    assert float(bounds.weight_product(x1, far, gamma, least, mu, radius)) == pytest.approx(1.0)
    log_printed = gamma * radius * mu**2  # D as printed
    printed = torch.full((1, 1), 2 * math.sqrt(log_printed), dtype=torch.float64)
    product = math.exp(log_printed - gamma / 4 * float(printed) ** 2)
    assert mu**2 * product == pytest.approx(1.52, abs=0.05)  # above 1, where the remark has it below


def test_unknown_forms() -> None:
    with pytest.raises(ValueError, match="unknown form 'apendix'; did you mean 'appendix'"):
        bounds.geq_sensitivity(SIZES, 1.0, form="apendix")
    with pytest.raises(ValueError, match="unknown form 'x'"):
        bounds.opteq_sensitivity(SIZES, 1.0, form="x")
    with pytest.raises(ValueError, match="unknown form 'sharpe'; did you mean 'sharp'"):
        bounds.geq_lipschitz(0.5, 0.5, form="sharpe")

"""The propositions of the GEQ paper as functions: what is proved, what is not, and where the paper differs.

Everything here is about the models as the paper analyses them, without patches: OptEq ``z = relu(W'W z + c)`` and GEQ
``z = relu(e W'(c - W z))`` with ``e = exp(-gamma |c - W z|^2)`` and ``c = U x + b``. Statements hold for every
activation with slopes between 0 and 1 that keeps zero at zero, unless they say relu. Norms of matrices are spectral.

Three facts about a GEQ equilibrium carry most of the proofs. With ``r = c - W z``, ``e <W z, r> >= |z|^2``; hence
``|r| <= |c|``; hence ``|z| <= min(e |W|, sqrt(e) / 2) |c|``.

>>> opteq_lipschitz(0.9, 0.9).value, geq_lipschitz(0.9, 0.9).value        # Proposition 3
(4.736842105263159, 0.5682817748467851)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from opteq.common.errors import unknown_name
from opteq.kernels.gaussian import DIP, response

FORMS = ("main", "appendix", "proved")
Form = Literal["main", "appendix", "proved"]


@dataclass(frozen=True)
class Bound:
    """A bound and its justification.

    Attributes:
        value: the bound; infinite where the statement does not apply.
        proved: whether every step that is about these models is proved.
        note: what it rests on, or what is missing.
    """

    value: float
    proved: bool
    note: str

    def __float__(self) -> float:
        return self.value


# Proposition 1: the Gaussian kernel as an inner product of infinitely many features.


@dataclass(frozen=True)
class Truncation:
    """A truncated Gaussian kernel and a bound of its error, one value per row."""

    value: Tensor
    error: Tensor


def feature_map(v: Tensor, gamma: float, order: int) -> Tensor:
    """The features ``sqrt((2 gamma)^i / i!) v^(i)`` for i up to ``order``: ``(B, n) -> (B, 1 + n + ... + n^order)``.

    ``v^(i)`` holds the n^i products of i entries (the paper prints i n^i of them, and i for i! in its appendix).
    Then ``exp(-gamma |a - b|^2) = exp(-gamma |a|^2 - gamma |b|^2) <features(a), features(b)>`` as the order grows.

    >>> feature_map(torch.tensor([[2.0, 3.0]]), gamma=0.5, order=1)
    tensor([[1., 2., 3.]])
    """
    power = torch.ones_like(v[:, :1])
    features = [power]
    for i in range(1, order + 1):
        power = (power[:, :, None] * v[:, None, :]).flatten(1)
        features.append(math.sqrt((2 * gamma) ** i / math.factorial(i)) * power)
    return torch.cat(features, dim=1)


def truncated_kernel(a: Tensor, b: Tensor, gamma: float, order: int) -> Truncation:
    """``exp(-gamma |a - b|^2)`` from the features up to ``order``, without forming them.

    Proved: with ``t = 2 gamma <a, b>`` and ``K = exp(-gamma |a|^2 - gamma |b|^2)`` the value is
    ``K sum_(i <= order) t^i / i!``, and what is left out is at most ``K e^|t| |t|^(order+1) / (order+1)!`` (Taylor).

    The paper writes ``|b|`` for ``|b|^2`` in K, drops the factor ``1 / (2 gamma)`` of the objective, and calls the
    result an OptEq. Since K depends on the state through ``b = W z``, it is not one: objectives agree, no more.
    """
    t = 2 * gamma * (a * b).sum(dim=1)
    log_scale = -gamma * (a.square().sum(dim=1) + b.square().sum(dim=1))
    total, term = torch.ones_like(t), torch.ones_like(t)
    for i in range(1, order + 1):
        term = term * t / i
        total = total + term
    log_error = log_scale + t.abs() + (order + 1) * t.abs().log() - math.lgamma(order + 2)
    return Truncation(log_scale.exp() * total, log_error.exp())


# Proposition 2: generalisation, by how much predictions move when all weights do.


@dataclass(frozen=True)
class WeightSizes:
    """The norms of the weights of ``W_c z + b_c`` for Proposition 2.

    Attributes:
        mu: the largest of ``|W|, |U|, |b|, |W_c|``; below 1.
        m: ``|W'W|``.
        squares: the sum of all squared weights. The paper has ``|W'W|_F^2`` where this has ``|W|_F^2``; but the noise
            of its proof is added to W, and then the divergence holds ``|W|_F^2``, the larger of the two.
        width: the largest side of a matrix.
    """

    mu: float
    m: float
    squares: float
    width: int

    @classmethod
    def of(cls, W: Tensor, U: Tensor, b: Tensor, W_c: Tensor, b_c: Tensor) -> WeightSizes:
        """The sizes of these matrices and vectors."""
        norms = [float(torch.linalg.matrix_norm(A.detach(), 2)) for A in (W, U, W_c)]
        squares = sum(float(A.detach().square().sum()) for A in (W, U, b, W_c, b_c))
        mu = max(*norms, float(b.detach().norm()))
        return cls(mu, norms[0] ** 2, squares, max(*W.shape, *U.shape, *W_c.shape))


def opteq_sensitivity(sizes: WeightSizes, radius: float, form: Form = "appendix") -> Bound:
    """How far predictions of OptEq move, relative to the largest change of a weight matrix, for inputs in a ball.

    Proved in the ``"appendix"`` form, for changes after which mu and m still bound the weights:
    ``2 mu^3 (B+1) / (1-m)^2 + 2 mu (B+1) / (1-m) + 1``. It follows from
    ``|dz| <= |d(W'W)| |c| / (1-m)^2 + |dc| / (1-m)``, which the paper's Lemma 1 prints as one fraction.
    The ``"main"`` form of the paper drops the 2 and the +1, and is not what the proof gives.
    """
    mu, rest = sizes.mu, 1 - sizes.m
    gain = 1 / rest if rest > 0 else math.inf
    if form == "main":
        value, note = mu**3 * radius * gain**2 + mu * radius * gain + 1, "Eq. 10 as printed; the proof gives more"
    elif form in ("appendix", "proved"):
        value = 2 * mu**3 * (radius + 1) * gain**2 + 2 * mu * (radius + 1) * gain + 1
        note = "Lemma 1, corrected; for changed weights within the same bounds"
    else:
        raise unknown_name("form", form, FORMS)
    return Bound(value if rest > 0 else math.inf, form != "main", note)


def geq_sensitivity(sizes: WeightSizes, radius: float, beta: float = 1.0, form: Form = "proved") -> Bound:
    """The same for GEQ, whose weight e is at most ``beta`` on all inputs.

    The paper's forms, ``"main"`` and ``"appendix"``, are not proved: they hold e fixed while the weights move. With
    ``|W| = 0.9`` and ``gamma |r|^2 = 3/2`` a change of b moves z more than twice as far as Eq. 33 allows.

    The ``"proved"`` form lets it move. ``r -> e r`` is 1-Lipschitz with derivative in [-2e^(-3/2), 1], so that
    ``|dz| <= |dW| beta |c| / (1 - 2e^(-3/2) mu^2) + response(mu) (|dc| + |dW| |z|)``, with
    ``|z| <= min(beta mu, sqrt(beta)/2) |c|``; again for changed weights within the same bounds. With ``m = mu^2`` it
    lies below that of OptEq for all mu, beta and B: the conclusion of Remark 1, without its hypotheses.
    """
    mu, m, B = sizes.mu, sizes.m, radius
    rest = 1 - beta * m
    gain = 1 / rest if rest > 0 else math.inf
    if form == "main":
        value = beta * mu**4 * B * gain**2 + (2 * mu * beta + 1) * mu * B * gain + 1
    elif form == "appendix":
        value = 2 * beta * mu**4 * (B + 1) * gain**2 + 2 * (2 * mu * beta + 1) * mu * (B + 1) * gain + 1
    elif form == "proved":
        largest = min(beta * mu, math.sqrt(beta) / 2) * mu * (B + 1)
        moved = beta * mu * (B + 1) / (1 - DIP * mu**2) + response(mu) * (B + 1 + largest)
        return Bound(mu * moved + largest + 1, True, "derived here; for changed weights within the same bounds")
    else:
        raise unknown_name("form", form, FORMS)
    note = "as printed; not proved, since the proof keeps e fixed while the weights change (Eq. 33)"
    return Bound(value if rest > 0 else math.inf, False, note)


def generalization_gap(sensitivity: Bound, sizes: WeightSizes, margin: float, samples: int, delta: float) -> Bound:
    """How far the error may exceed the share of training samples within ``margin``, with probability ``1 - delta``.

    ``sqrt(16 h ln(24 h) K^2 S / (margin^2 M) + ln(M sqrt(M) / delta) / M)`` for sensitivity K, width h, sum of squared
    weights S and M samples. This is the paper's expression: the PAC-Bayes lemma behind it has another constant (4 in
    front, M - 1 below) and needs Gaussian noise to leave the norms within their bounds, so it compares models rather
    than predicts errors. ``proved`` repeats that of the sensitivity.
    """
    h, M = sizes.width, samples
    divergence = 16 * h * math.log(24 * h) * sensitivity.value**2 * sizes.squares / margin**2
    value = math.sqrt(divergence / M + math.log(M * math.sqrt(M) / delta) / M)
    return Bound(value, sensitivity.proved, f"up to a universal constant; sensitivity: {sensitivity.note}")


# Proposition 3: Lipschitz constants from input to state.


def opteq_lipschitz(w: float, u: float) -> Bound:
    """``|U| / (1 - |W|^2)`` for OptEq. Proved, and attained by scalars."""
    return Bound(u / (1 - w**2) if w < 1 else math.inf, True, "from (I - D W'W)^-1 D U; attained")


def geq_lipschitz(w: float, u: float, form: Literal["sharp", "simple"] = "sharp") -> Bound:
    """A constant for GEQ that holds for every gamma and every input.

    Proved. ``"simple"`` is ``|U| |W| / (1 - 2e^(-3/2) |W|^2)``: in ``dz = S (I + S H S)^-1 S W' A U dx`` the matrix
    ``A = e (I - 2 gamma rr')`` has norm at most 1 and ``H = W'AW >= -2e^(-3/2) |W|^2``. ``"sharp"`` is
    ``|U| response(|W|)``, the exact supremum of that formula (:func:`~opteq.kernels.gaussian.response`): less than half
    of the simple one for ``|W| >= 0.8``, and attained by scalars for ``|W| >= 0.93``.

    Both are finite up to ``|W|^2 = 2.2408`` and lie below the constant of OptEq for all ``|W| < 1``. So the conclusion
    of the paper's Remark 2 always holds, though its hypotheses (e < 0.8, B < 1, sqrt(gamma) < 0.2) cannot hold
    together: they force e >= exp(-0.04).
    """
    rest = 1 - DIP * w**2
    if form == "simple":
        return Bound(u * w / rest if rest > 0 else math.inf, True, "|W' A U| over the least eigenvalue of I + S H S")
    if form == "sharp":
        return Bound(u * response(w), True, "the largest |(I + N'AN)^-1 N'A|; attained")
    raise unknown_name("form", form, ("sharp", "simple"))


def geq_lipschitz_printed(mu: float, beta: float, gamma: float, radius: float, bias: float = 0.0) -> Bound:
    """Proposition 3 of the paper: ``k / (1 - k)`` with ``k = beta mu^2 + sqrt(gamma) B mu^3``, where ``k < 1``.

    True, although its proof uses ``|r| <= mu B`` without saying why (it is the second of the facts above; the triangle
    inequality gives twice that). It holds for mu >= |W|, |U|, inputs of norm at most B and weights e of at most beta;
    with a bias, ``B + |b| / mu`` takes the place of B.
    """
    k = beta * mu**2 + math.sqrt(gamma) * (radius + bias / mu) * mu**3
    return Bound(k / (1 - k) if k < 1 else math.inf, True, "for inputs in a ball; nothing where k >= 1")


# Proposition 4: how alike the states of two inputs are, for random U.


def relu_similarity(x1: Tensor, x2: Tensor, variance: float, units: int) -> Tensor:
    """``E <relu(U x1), relu(U x2)>`` for rows of U from ``N(0, variance I)``: exact, one value per row.

    The paper's Lemma 3 is for one unit; the expectation over n of them is n times as large.
    """
    sizes = _lengths(x1) * _lengths(x2)
    # The similarity with a zero input is zero, whatever its angle.
    angle = torch.arccos(((x1 * x2).sum(dim=1) / torch.where(sizes > 0, sizes, 1.0)).clamp(-1, 1))
    return units * variance * sizes * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)


def opteq_similarity(x1: Tensor, x2: Tensor, variance: float, units: int, w: float) -> Tensor:
    """An upper bound of ``E <z1, z2>`` for OptEq with relu, no bias and ``|W| <= w < 1``.

    Proved: ``n variance |x1| |x2| / (2 (1 - w^2)^2)``, from ``|z| <= |relu(U x)| / (1 - w^2)``. The paper's bound, with
    the factor of :func:`relu_similarity`, is false where ``W'W`` couples units: for ``x2 = -x1`` it is zero and
    ``E <z1, z2>`` is not. For diagonal W'W see :func:`opteq_similarity_diagonal`. Infinite from ``w = 1`` on.
    """
    lengths = _lengths(x1) * _lengths(x2)
    if w >= 1:
        return torch.full_like(lengths, math.inf)
    return units * variance * lengths / (2 * (1 - w**2) ** 2)


def opteq_similarity_diagonal(x1: Tensor, x2: Tensor, variance: float, diagonal: Tensor) -> Tensor:
    """``E <z1, z2>`` for OptEq with relu, no bias and ``W'W = diag(diagonal)``: the paper's bound, where it holds.

    With entries below 1. The units are then independent, ``z_i = relu((U x)_i) / (1 - d_i)``: this is exact.
    """
    return relu_similarity(x1, x2, variance, 1) * (1 - diagonal).pow(-2).sum()


def geq_similarity(c1: Tensor, c2: Tensor, e1: Tensor, e2: Tensor, w: float) -> Tensor:
    """An upper bound of ``<z1, z2>`` for GEQ: ``w^2 e1 e2 |c1| |c2|``, one value per row.

    Proved, for every pair of inputs and not only on average, from ``|z| <= e |W| |c|``. The paper's bound of the
    expectation is false for the reason given in :func:`opteq_similarity`.
    """
    return w**2 * e1 * e2 * _lengths(c1) * _lengths(c2)


def weight_product(x1: Tensor, x2: Tensor, gamma: float, least: float, w: float, radius: float) -> Tensor:
    """An upper bound of ``e1 e2`` for GEQ: far inputs cannot both fit their states.

    Proved for states ``z >= 0`` of norm at most ``radius`` and U with smallest singular value ``least``:
    ``D exp(-gamma/4 least^2 |x1 - x2|^2)`` with ``D = exp(gamma radius^2 w^2)``. The paper has gamma in some places
    and gamma/4 in others, and D without the square of the radius; with gamma or gamma/2 it is false.
    """
    apart = (x1 - x2).square().sum(dim=1)
    return torch.exp(gamma * radius**2 * w**2 - gamma / 4 * least**2 * apart)


def separation(least: float, w: float, radius: float) -> float:
    """The distance of two inputs from which :func:`weight_product` is at most 1: ``2 radius |W| / least``.

    The threshold of Remark 3, with the 1/gamma that it lacks: ``2 sqrt(log(D) / gamma) / least``.
    """
    return 2 * radius * w / least


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths

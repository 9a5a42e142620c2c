"""The Gaussian kernel, on the whole input or on patches of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from opteq.common.override import overridable
from opteq.common.validate import check_choice, check_positive
from opteq.kernels.base import HessianProduct, Kernel, Similarity
from opteq.operators import Dense, LinearMap, Patches
from opteq.states import sum_over_sample, working_dtype

DIP = 2 * math.exp(-1.5)
"""The eigenvalues of the Hessian of ``exp(-|q|^2) / 2`` run from -1, at ``q = 0``, to this, at ``|q|^2 = 3/2``."""

SHARE = 0.2
"""``gamma="auto"`` gives the nearest patch the weight ``exp(-SHARE)`` at the start."""

LEAST_SHARE = 1e-6
"""Floor of the smallest squared distance, relative to the mean over a sample's patches: an empty patch (a black
corner, say) would otherwise make gamma infinite and switch every other patch off."""


class Gaussian(Kernel):
    """``s(y) = 1/(2 gamma) sum_i exp(-gamma |q_i|^2)``, where ``q_i`` is patch i of ``U x + b - W y``, projected.

    The step is ``y <- sigma(W' R' [e_i q_i P'])`` with the weights ``e_i = exp(-gamma |q_i|^2)``: patches that the
    state matches count, and others hardly do, so the weights can be read as attention. ``U x + b`` is in the space of
    W's output.

    The eigenvalues of ``hess s`` lie in ``|W|^2 |P|^2 [-1, 2e^(-3/2)]`` for every gamma. So, with L the largest slope
    of the activation, the objective is strongly convex and has one equilibrium for ``L |W|^2 |P|^2 < 2.2408``, and
    plain steps contract below 1.

    Args:
        gamma: sharpness. A positive number, or ``"auto"``: 0.2 / M for each sample, with M the smallest ``|q_i|^2`` of
            its patches at the zero state; ``"median"`` takes their median for M, which is robust to a single empty
            patch. Gamma is computed once, when the input is bound, and detached: if it were recomputed in every step,
            there would be no objective.
        patch: side of a patch in pixels; None compares the whole input as one patch.
        split: channels in a patch; given together with ``patch``. The paper uses ``patch=2, split=8``.
        hidden: size to which patches are projected by a learned matrix P, one for all patches, kept as
            ``projection``; None compares the patches themselves.
        learn_gamma: make gamma a parameter, kept positive as ``exp(log_gamma)``; it begins at the number given.
        bound: largest norm of the projection. With 1, the guarantees depend on the bound of W alone. None for no bound.

    >>> kernel = Gaussian(patch=2, split=4, hidden=8)
    >>> kernel.projection
    Dense(16, 8, bound=1.0)
    """

    input_space = "output"
    curvature = (-1.0, DIP)
    growth = 0.0
    log_gamma: nn.Parameter | None

    def __init__(
        self,
        gamma: float | str = "auto",
        patch: int | None = None,
        split: int | None = None,
        hidden: int | None = None,
        *,
        learn_gamma: bool = False,
        bound: float | None = 1.0,
    ) -> None:
        super().__init__()
        self._gamma = _check_gamma(gamma, learn_gamma)
        self.follows_input = isinstance(self._gamma, str)
        self.log_gamma = nn.Parameter(torch.tensor(math.log(float(self._gamma)))) if learn_gamma else None
        if (patch is None) != (split is None):
            raise ValueError(
                f"Gaussian.patch and Gaussian.split go together, sides and channels of a patch; got {patch=}, {split=}"
            )
        self.patches = None if patch is None or split is None else Patches(split, patch)
        if hidden is None and bound != 1.0:
            raise ValueError(
                f"Gaussian.bound is of the projection to `hidden` numbers, so it needs hidden; got {bound=}"
            )
        if hidden is not None:
            if self.patches is None:
                raise ValueError(f"Gaussian.hidden projects patches, so it needs patch and split; got {hidden=} alone")
            self.projection = Dense(self.patches.split * self.patches.patch**2, hidden, bound=bound)

    @property
    def gamma(self) -> float | str | Tensor:
        """The sharpness: a number, the name of a rule, or a tensor where it is learned."""
        return self._gamma if self.log_gamma is None else self.log_gamma.exp()

    def bind(self, W: LinearMap, c: Tensor) -> GaussianSimilarity:
        """Cut, project and, where it is automatic, choose gamma."""
        cut = _WholeSample(c.shape[1:]) if self.patches is None else self.patches.prepare()
        grid = (1, 1, 1) if self.patches is None else _grid(self.patches, c)
        project = None if self.projection is None else self.projection.prepare()
        view = _PatchProjection(cut, project)
        gamma: float | Tensor
        if self.log_gamma is not None:
            gamma = self.log_gamma.to(working_dtype(self.log_gamma.dtype)).exp()
        elif isinstance(self._gamma, str):
            gamma = automatic_gamma(view, c, self._gamma == "median")
        else:
            gamma = self._gamma
        return GaussianSimilarity(W, c, view, gamma, grid)

    def input_gain(self, norm: float, slope: float) -> tuple[float | None, str]:
        """``sqrt(L) response(sqrt(L) |W| |P|)``, plus what an automatic gamma adds for one patch.

        With ``gamma = 0.2 / M`` the weights also move because M does. ``sqrt(M)`` is 1-Lipschitz in the projected input
        and ``|q|^3 exp(-gamma |q|^2) <= (3 / (2 e gamma))^(3/2)``: the two multiply to a number without scale. For N
        patches it comes with ``sqrt(N)``, and N depends on the input's size.
        """
        reach = math.sqrt(slope) * norm
        if DIP * reach**2 >= 1:
            return None, f"needs L |W|^2 |P|^2 < 1 / (2 e^(-3/2)) = {1 / DIP:.5g}"
        gain, reason = response(reach), "r the response of the Gaussian kernel at r0 = sqrt(L) |W| |P|"
        if self.follows_input:
            if self.patches is not None:
                return None, (
                    'gamma="auto" is itself a function of the input, 0.2 / M(x), and what that adds grows with the '
                    "number of patches; with a fixed gamma the constant from the projected input to the state "
                    f"would be {math.sqrt(slope) * gain:.4g}"
                )
            gain += 2 * SHARE * (3 / (2 * math.e * SHARE)) ** 1.5 * reach / (1 - DIP * reach**2)
            reason += ' plus 1.83 r0 / (1 - 2 e^(-3/2) r0^2) for gamma="auto", which moves with the input'
        return math.sqrt(slope) * gain, f"|U| |P| sqrt(L) r, {reason}"

    def extra_repr(self) -> str:
        return f"gamma={'learned' if self.log_gamma is not None else repr(self.gamma)}"


class GaussianSimilarity(Similarity):
    """The Gaussian kernel with its input bound and its gamma computed.

    Attributes:
        gamma: a number, or a tensor that broadcasts against the weights.
        grid: how patches lie in W's output: channel groups, rows and columns.
    """

    def __init__(
        self, W: LinearMap, c: Tensor, view: LinearMap, gamma: float | Tensor, grid: tuple[int, int, int]
    ) -> None:
        super().__init__(W, c)
        self.view = view
        self.gamma = gamma
        self.grid = grid

    def weights(self, y: Tensor) -> Tensor:
        """The weight ``e_i`` of every patch, ``(B, groups, rows, columns)``, between 0 and 1."""
        return self._compare(y)[1]

    def value(self, y: Tensor) -> Tensor:
        return self._total(self._compare(y)[1])

    def terms(self, y: Tensor) -> dict[str, Tensor]:
        return {"gaussian": self.value(y)}

    def gradient(self, y: Tensor) -> Tensor:
        """``W' R' [e_i q_i P']``."""
        return self._pulled(y)[0]

    def gradient_and_value(self, y: Tensor) -> tuple[Tensor, Tensor]:
        gradient, weights = self._pulled(y)
        return gradient, self._total(weights)

    def _pulled(self, y: Tensor) -> tuple[Tensor, Tensor]:
        q = self._projected(y)
        weights, weighed = weigh(q, self.gamma)
        return self.W.adjoint(self.view.adjoint(weighed)), weights

    def hessian_at(self, y: Tensor) -> HessianProduct:
        """``v -> -W' R' [e_i (a_i - 2 gamma q_i <q_i, a_i>) P']`` with ``a_i`` patch i of ``W v``, projected."""
        q, weights = self._compare(y)

        def product(v: Tensor) -> Tensor:
            a = self.view(self.W(v))
            return self.W.adjoint(self.view.adjoint(weigh_derivative(q, a, self.gamma, weights)))

        return product

    def _compare(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The projected patches q ``(B, *grid, d)`` and their weights ``(B, *grid)``, in float32 or better."""
        q = self._projected(y)
        return q, torch.exp(-self.gamma * squares(q))

    def _projected(self, y: Tensor) -> Tensor:
        return self.view(self.c - self.W(y))

    def _total(self, weights: Tensor) -> Tensor:
        return sum_over_sample(weights / (2 * self.gamma))


class _WholeSample(LinearMap):
    """A sample as its only patch: ``(B, ...) -> (B, 1, 1, 1, n)``."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def __call__(self, v: Tensor) -> Tensor:
        return v.reshape(v.shape[0], 1, 1, 1, math.prod(self.shape))

    def adjoint(self, u: Tensor) -> Tensor:
        return u.reshape(u.shape[0], *self.shape)


class _PatchProjection(LinearMap):
    """Cut into patches, then project."""

    def __init__(self, cut: LinearMap, project: LinearMap | None) -> None:
        self.cut = cut
        self.project = project

    def __call__(self, v: Tensor) -> Tensor:
        rows = self.cut(v)
        return rows if self.project is None else self.project(rows)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.cut.adjoint(u if self.project is None else self.project.adjoint(u))


@overridable
def weigh(q: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """The weights ``e_i = exp(-gamma |q_i|^2)`` of projected patches, and the patches times theirs."""
    weights = torch.exp(-gamma * squares(q))
    return weights, _scale(weights, q)


@overridable
def weigh_derivative(q: Tensor, a: Tensor, gamma: float | Tensor, weights: Tensor) -> Tensor:
    """``e_i (2 gamma <q_i, a_i> q_i - a_i)``: the derivative of ``-e_i q_i`` along ``a_i``."""
    along = (q.to(weights.dtype) * a).sum(dim=-1)
    return _scale(2 * gamma * weights * along, q) - _scale(weights, a)


def squares(q: Tensor) -> Tensor:
    """``|q_i|^2`` over the last dimension, in float32 or better."""
    return q.to(working_dtype(q.dtype)).square().sum(dim=-1)


@torch.no_grad()
def automatic_gamma(view: LinearMap, c: Tensor, median: bool = False) -> Tensor:
    """``0.2 / M`` as ``(B, 1, 1, 1)``: M is the least ``|q_i|^2`` of a sample at ``y = 0``, kept away from zero.

    With ``median`` it is their median, so that half of the patches weigh more than ``exp(-0.2)`` and half less.
    """
    sizes = squares(view(c))
    grid = (1, 2, 3)
    chosen = sizes.amin(dim=grid) if not median else sizes.flatten(1).median(dim=1).values
    chosen = chosen.reshape(-1, 1, 1, 1)
    least = torch.maximum(chosen, LEAST_SHARE * sizes.mean(dim=grid, keepdim=True))
    return SHARE / least.clamp_min(torch.finfo(sizes.dtype).tiny ** 0.5)


def response(norm: float) -> float:
    """The largest ``|(I + N'AN)^-1 N'A|`` over ``|N| <= norm`` and symmetric A with ``-DIP <= A <= 1``.

    That is how far an equilibrium can move for a unit change of its (projected) input, ``N = P W D^(1/2)`` being the
    operator as the active units see it and A the curvature of the patches. With w the change and ``v = N w``, pairing
    the linear system with w and splitting A by sign gives ``|w| <= sqrt(a + DIP^2 b) / (1 + a - DIP b)`` for some
    ``a + b <= norm^2``, attained by ``A = diag(1, -DIP)`` and N of rank one; infinite from ``norm^2 = 1 / DIP`` on.

    >>> round(response(0.9), 4), round(response(0.3), 4)
    (0.6314, 0.2752)
    """
    square = norm**2
    rest = 1 - DIP * square
    if rest <= 0:
        return math.inf
    best = rest / (1 + DIP) - 2 * DIP**2 * square / (1 - DIP**2)
    a = min(max(best, 0.0), square)
    return math.sqrt(a + DIP**2 * (square - a)) / (1 + a - DIP * (square - a))


def _scale(numbers: Tensor, rows: Tensor) -> Tensor:
    """Rows ``(..., d)`` times a number each, in the rows' dtype."""
    return numbers.to(rows.dtype)[..., None] * rows


def _grid(patches: Patches, c: Tensor) -> tuple[int, int, int]:
    if c.ndim != 4:
        raise ValueError(
            "Gaussian.patch cuts images (batch, channels, height, width), "
            f"but W's output and U x + b have shape {tuple(c.shape)}; leave patch and split out"
        )
    try:
        return patches.prepare().grid(c.shape)
    except ValueError as error:
        raise ValueError(f"{error}: that image is W's output, which has the shape of U x + b") from error


def _check_gamma(gamma: float | str, learn: bool) -> float | str:
    """``gamma`` as a number, or the name of a rule."""
    if not isinstance(gamma, str):
        return check_positive("Gaussian.gamma (or 'auto', 'median')", gamma)
    if check_choice("Gaussian.gamma", gamma, ("auto", "median")) and learn:
        raise ValueError("Gaussian.learn_gamma needs a number to begin from, Gaussian(gamma=1.0, learn_gamma=True)")
    return gamma

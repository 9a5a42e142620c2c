"""Maps, activations and equilibria in float64, by dense linear algebra: nothing here is the library's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Weights = dict[str, Tensor]


ACTIVATIONS = {
    "identity": lambda t: t,
    "relu": lambda t: t.clamp(min=0),
    "leaky_relu": lambda t: torch.where(t > 0, t, 0.01 * t),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda t: torch.logaddexp(t, torch.zeros_like(t)),
    "elu": lambda t: torch.where(t > 0, t, torch.expm1(t.clamp(max=0))),
    "soft_threshold": lambda t: t.sign() * (t.abs() - 0.1).clamp(min=0),
    "hardtanh": lambda t: t.clamp(-1, 1),
    "softsign": lambda t: t / (1 + t.abs()),
}
KINKS = {"relu": (0.0,), "leaky_relu": (0.0,), "soft_threshold": (-0.1, 0.1), "hardtanh": (-1.0, 1.0)}
SLOPES = {"sigmoid": 0.25}  # the largest slope of the others is 1
BOUNDED = ("tanh", "sigmoid", "hardtanh", "softsign")


def forward(weight: Tensor, v: Tensor) -> Tensor:
    """``W v`` for a matrix, or for a convolution of stride 1 that keeps the size."""
    if weight.ndim == 2:
        return v @ weight.T
    return F.conv2d(v, weight, padding=(weight.shape[2] // 2, weight.shape[3] // 2))


def backward(weight: Tensor, u: Tensor) -> Tensor:
    """``W' u``."""
    if weight.ndim == 2:
        return u @ weight
    return F.conv_transpose2d(u, weight, padding=(weight.shape[2] // 2, weight.shape[3] // 2))


def matrix(weight: Tensor, size: tuple[int, ...] = ()) -> Tensor:
    """``W`` as a matrix, for images of ``size``."""
    if weight.ndim == 2:
        return weight
    count = weight.shape[1] * size[0] * size[1]
    basis = torch.eye(count, dtype=weight.dtype).reshape(count, weight.shape[1], *size)
    return forward(weight, basis).reshape(count, -1).T


def norm(weight: Tensor, size: tuple[int, ...] = ()) -> float:
    """The largest singular value of :func:`matrix`."""
    return float(torch.linalg.matrix_norm(matrix(weight, size), 2))


def pooled(x: Tensor, scale: int) -> Tensor:
    """Means over squares of ``scale`` pixels."""
    return x if scale == 1 else F.avg_pool2d(x, scale)


def resized(z: Tensor, size: tuple[int, ...]) -> Tensor:
    """Means over squares one way, the adjoint of that the other way."""
    if z.ndim == 2 or z.shape[2:] == size:
        return z
    if z.shape[2] > size[0]:
        return F.avg_pool2d(z, z.shape[2] // size[0])
    factor = size[0] // z.shape[2]
    return z.repeat_interleave(factor, 2).repeat_interleave(factor, 3) / factor**2


@dataclass(frozen=True)
class Equations:
    """A fixed-point problem ``y = sigma(inside(y))`` for a batch, as pure functions of weights, input and state.

    Attributes:
        inside: what activations are applied to, at a state.
        step: the map.
        features: what is handed on from a state.
        shapes: of the state's blocks, for one sample.
        kinks: where activations have no derivative.
        contraction: a bound on the Lipschitz constant of the step for given weights, None where there is none.
        size: of each sample, how large the terms are that make up the input's share. Rounding is relative to them.
        distance: a factor from the residual ``|T(y) - y|`` to the distance from the only equilibrium; None takes
            ``1 / (1 - contraction)``.
        of_length: for objectives, the map ``prox_{t h}(y - t grad F(y))`` with step lengths t of each sample, where
            that prox is a formula.
    """

    inside: Callable[[Weights, Tensor, State], State]
    step: Callable[[Weights, Tensor, State], State]
    features: Callable[[Weights, Tensor, State], State]
    shapes: Sequence[tuple[int, ...]]
    kinks: tuple[float, ...]
    contraction: Callable[[Weights], float | None]
    size: Callable[[Weights, Tensor], Tensor]
    distance: Callable[[Weights], float | None] | None = None
    of_length: Callable[[Weights, Tensor, State, Tensor], State] | None = None

    def zero(self, batch: int) -> State:
        return tuple(torch.zeros(batch, *shape, dtype=torch.float64) for shape in self.shapes)

    def stepping(self, length: Tensor) -> Equations | None:
        """The same equilibria by steps of a length, one per sample; None where these are not known."""
        moved = self.of_length
        if moved is None:
            return None
        return dataclasses.replace(self, step=lambda w, x, y: moved(w, x, y, length))

    def amplification(self, w: Weights) -> float | None:
        """The factor :attr:`distance`; None where it is unknown or beyond 1e6."""
        if self.distance is not None:
            factor = self.distance(w)
        else:
            rate = self.contraction(w)
            factor = None if rate is None or rate > 0.98 else 1 / (1 - rate)
        return factor if factor is not None and factor < 1e6 else None


def flat(state: Sequence[Tensor]) -> Tensor:
    """A state as a matrix with a row for each sample."""
    return torch.cat([part.reshape(len(part), -1) for part in state], dim=1)


def unflat(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> State:
    counts = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(rows, counts, dim=1)
    return tuple(part.reshape(len(rows), *shape) for part, shape in zip(parts, shapes, strict=True))


def residual(equations: Equations, w: Weights, x: Tensor, y: State) -> tuple[Tensor, Tensor]:
    """``|T(y) - y|`` and ``|T(y)|`` of each sample."""
    image = flat(equations.step(w, x, y))
    return (image - flat(y)).norm(dim=1), image.norm(dim=1)


def by_rows(function: Callable[[Tensor, Tensor], Tensor], given: Tensor, fixed: Tensor) -> Tensor:
    """The Jacobians of ``function(given, fixed)`` by ``given``, one per sample; samples don't depend on each other.

    Every sample is repeated once per output, so that one pass back gives all rows.
    """
    with torch.no_grad():
        count = function(given, fixed).shape[1]
    copies = given.detach().repeat_interleave(count, 0).requires_grad_()
    with torch.enable_grad():
        outputs = function(copies, fixed.repeat_interleave(count, 0))
        outputs = outputs + 0 * copies.reshape(len(copies), -1).sum(1, keepdim=True)  # where it depends on neither
        which = torch.eye(count, dtype=given.dtype).repeat(len(given), 1)
        (rows,) = torch.autograd.grad(outputs, copies, which, allow_unused=True, materialize_grads=True)
    return rows.reshape(len(given), count, -1)


def jacobian(equations: Equations, w: Weights, x: Tensor, y: State) -> Tensor:
    """The Jacobians of the step by the state, ``(B, n, n)``, by autograd."""
    return by_rows(lambda rows, inputs: flat(equations.step(w, inputs, unflat(rows, equations.shapes))), flat(y), x)


def eigenvalues(local: Tensor) -> Tensor:
    """Real parts of the eigenvalues of Jacobians ``J = D M``, D diagonal and not negative, M symmetric.

    Where saturated slopes make the entries of J differ by hundreds of orders of magnitude, the QR iteration for general
    matrices may not converge. J has the eigenvalues of ``sqrt(D) M sqrt(D)``, whose entries are those of
    ``sign(J) sqrt(|J * J'|)``: a symmetric matrix, for which it always does.
    """
    try:
        return torch.linalg.eigvals(local).real
    except torch.linalg.LinAlgError:
        size = local.abs().sqrt()  # before the product, which might underflow
        return torch.linalg.eigvalsh(local.sign() * size * size.mT)


def polished(
    equations: Equations, w: Weights, x: Tensor, y: State, local: Tensor | None = None, steps: int = 30
) -> tuple[State, Tensor]:
    """Equilibria close to ``y``, by Newton's method with dense solves, and for which samples there is one.

    ``local`` is the Jacobian at y where that is known.
    """
    rows = flat(y).clone()
    left = rows.isfinite().all(dim=1).nonzero()[:, 0]
    last = torch.full((len(rows),), torch.inf, dtype=rows.dtype)
    for step in range(steps):
        state = unflat(rows[left], equations.shapes)
        gap = flat(equations.step(w, x[left], state)) - rows[left]
        size, distance = rows[left].norm(dim=1), gap.norm(dim=1)
        # Rounding ends it, too: close, and no longer halved.
        still = (distance > 1e-14 * size.clamp_min(1e-300)) & ((distance > 1e-13 * size) | (distance < last[left] / 2))
        still &= gap.isfinite().all(dim=1)
        last[left] = distance
        left, gap = left[still], gap[still]
        if not len(left):
            break
        if step == 0 and local is not None:
            found = local[left]
        else:
            found = jacobian(equations, w, x[left], tuple(part[still] for part in state))
        system = torch.eye(rows.shape[1], dtype=rows.dtype) - found
        fine = system.isfinite().all(dim=2).all(dim=1)
        left = left[fine]
        rows[left] += torch.linalg.lstsq(system[fine], gap[fine][:, :, None]).solution[:, :, 0]
    state = unflat(rows, equations.shapes)
    gap, size = residual(equations, w, x, state)
    return state, gap <= 1e-11 * size


def gradients(
    equations: Equations, w: Weights, x: Tensor, y: State, probe: Callable[[State], Tensor], local: Tensor
) -> tuple[Tensor, Weights]:
    """What ``probe(features)`` gives to the input and to every weight, at equilibria ``y``.

    The implicit function theorem, word for word: ``v = (I - J')^-1 g`` by a dense solve, then one step with v. J is
    ``local``: the Jacobians of the step, or zero for the gradient of one step.
    """
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in w.items()}
    inputs = x.detach().clone().requires_grad_()
    state = tuple(part.detach().clone().requires_grad_() for part in y)
    loss = probe(equations.features(leaves, inputs, state))
    incoming = torch.autograd.grad(loss, state, retain_graph=True, allow_unused=True, materialize_grads=True)
    system = torch.eye(local.shape[-1], dtype=torch.float64) - local
    vector = unflat(torch.linalg.solve(system.mT, flat(incoming)[:, :, None])[:, :, 0], equations.shapes)
    carried = sum((v * part).sum() for v, part in zip(vector, equations.step(leaves, inputs, state), strict=True))
    targets = [inputs, *leaves.values()]
    found = torch.autograd.grad(loss + carried, targets, allow_unused=True, materialize_grads=True)
    return found[0], dict(zip(leaves, found[1:], strict=True))

"""Stand-ins for tensors that record how far a value bends.

:mod:`opteq.common.curvature.certify` calls a function ``terms(y, x)`` with objects of this module in place of tensors.
They record how a value bends with y: linear maps carry bounds on their singular values, and squares and potentials of
them an interval that the eigenvalues of their Hessian lie in. What is not listed here is not known, and says so. Shapes
are not known either: where broadcasting could repeat entries, only bounds that survive any number of copies are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from opteq.common.curvature.arithmetic import (
    ARITHMETIC,
    CURVES,
    LOSSES,
    NAMES,
    SOME,
    SWAPPED,
    NotKnown,
    as_number,
    changes_in_place,
    check_within_samples,
    contraction_norm,
    is_kind,
    largest_norm,
    left_out,
    sum_above,
    sum_below,
    times,
)


class Bounds:
    """What is known of a value in place of a tensor; takes part in torch's protocol for overriding its functions."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        if changes_in_place(name) or kwargs.get("out") is not None:
            raise NotKnown(f"it changes a tensor in place by {name!r}")
        if not _depend_on_y(args, kwargs):
            return args[0].zeros() if name == "zeros_like" and is_kind(args[0], Given) else Given()
        name = name.strip("_") if name.startswith("__") else name
        if not is_kind(args[0], Bounds) and name in SWAPPED and len(args) == 2:
            name, args = SWAPPED[name], args[::-1]
        if name == "einsum":
            return _einsum(*args)
        if not is_kind(args[0], Bounds):
            raise NotKnown(f"it uses {name!r}")
        return Bounds.__getattr__(args[0], name)(*args[1:], **kwargs)

    def __getattr__(self, name: str) -> Any:
        if is_kind(self, Bent) and self.linear and not hasattr(Bent, NAMES.get(name, name)):
            return getattr(Affine(inf, 0.0, inf, None), name)
        if name in CURVES and is_kind(self, Affine):
            return partial(self._curve, name)
        if name in LOSSES:
            return partial(self._loss, name)
        if name in NAMES:
            return getattr(self, NAMES[name])
        if name in ("shape", "size"):
            return Given()
        raise NotKnown(f"it uses {name.lstrip('_')!r}")

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> Any:  # isinstance looks here, unless the answer is yes
            raise NotKnown("it asks for the type of a tensor or an input")

        def __float__(self) -> float:
            raise NotKnown("it needs numbers")

        __int__ = __index__ = __complex__ = __float__

    def __neg__(self) -> Any:
        return self._mul(-1.0)

    def __add__(self, other: Any) -> Any:
        return self._add(other)

    def __sub__(self, other: Any) -> Any:
        return self._add(-other)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._add(other)

    def __mul__(self, other: Any) -> Any:
        return self._mul(other)

    def __truediv__(self, other: Any) -> Any:
        if not is_kind(other, int, float, Tensor):
            raise NotKnown("it divides by what depends on y or x")
        return self._mul(1 / other)

    def __pow__(self, exponent: Any) -> Any:
        if not is_kind(exponent, int, float) or exponent not in (2, 0.5):
            raise NotKnown(f"it uses a power of {exponent}")
        return self._square() if exponent == 2 else self._sqrt()

    def __matmul__(self, other: Any) -> Any:
        return self._matmul(other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._rmatmul(other)

    def _loss(self, name: str, target: Any, **options: Any) -> Any:
        """A loss of torch's own, entry by entry."""
        others = {option for option, value in options.items() if value is not None} - {"reduction", "beta", "delta"}
        if options.get("reduction") != "none" or others:
            raise NotKnown(f"it uses {name!r} otherwise than with reduction='none' and without weights")
        difference = self - target
        if not is_kind(difference, Affine):
            raise NotKnown(f"it uses {name!r} of values of a term")
        return difference._square() if name == "mse_loss" else difference.bent(0.0, 1 / options.get("beta", 1.0))

    def __bool__(self) -> bool:
        raise NotKnown("it branches on values")

    def __len__(self) -> int:
        raise NotKnown("it reads the size of a batch")

    def __iter__(self) -> Any:
        raise NotKnown("it takes a tensor, a shape, or a state of several tensors, apart")

    def _compare(self, _: Any) -> Any:
        raise NotKnown("it compares values")

    def _change(self, *_: Any) -> Any:  # another name for the same tensor would see it
        raise NotKnown("it changes a tensor in place (write a = a + b instead of a += b)")

    __radd__, __rmul__, __hash__ = __add__, __mul__, object.__hash__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: self._compare(other)
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = __setitem__ = _change


Known = TypeVar("Known", bound=Bounds)
_MANY = 100
"""More parts than an input has."""


class Given(Bounds):
    """A value that depends on the input x alone."""

    def through(self, norm: float, operator: Any, adjoint: bool) -> Given:  # noqa: ARG002
        """After a linear map, an operator or its adjoint, of that norm."""
        return Given()

    def zeros(self) -> Given:
        """Zeros of its shape."""
        return Given()

    def __getattr__(self, name: str) -> Any:
        if name in ("ndim", "dtype", "device", "dim"):
            raise NotKnown(f"it reads {name!r}")
        if changes_in_place(name):
            self._change()
        return getattr(self, NAMES[name]) if name in ARITHMETIC else Given()

    def __call__(self, *args: Any, **kwargs: Any) -> Given:
        """A method of it."""
        if _depend_on_y(args, kwargs):
            raise NotKnown("it calls a method of what depends on x with y")
        return Given()

    __getitem__ = _compare = __call__

    def _mul(self, other: Any) -> Any:
        return other._mul(self) if is_kind(other, Affine, Bent) else Given()

    def _add(self, other: Any) -> Any:
        return other._add(self) if is_kind(other, Affine, Bent) else Given()

    def _square(self) -> Given:
        return Given()

    def _matmul(self, other: Any) -> Any:
        return other._rmatmul(self) if is_kind(other, Affine, Bent) else Given()

    def __truediv__(self, other: Any) -> Any:
        return super().__truediv__(other) if is_kind(other, Affine, Bent) else Given()


class Input(Given):
    """The input x, or minus x; a tuple of ``parts``, where that is known."""

    def __init__(self, parts: int | None = None) -> None:
        self.parts = parts
        self.apart = False

    def __neg__(self) -> Input:
        return self

    def __iter__(self) -> Any:
        """``a, b = x`` finds too many parts as long as their number is not known, and tells it by its error."""
        self.apart = True
        for _ in range(_MANY if self.parts is None else self.parts):
            yield Given()

    def through(self, norm: float, operator: Any, adjoint: bool) -> Given:  # noqa: ARG002
        return Image(None if operator.keeps_shape else operator, adjoint)

    def zeros(self) -> Given:
        return Image(None, False)


class Image(Given):
    """Of the shape that x has after an operator, or its adjoint; of that of x itself without an operator."""

    def __init__(self, operator: Any, adjoint: bool) -> None:
        self.operator, self.adjoint = operator, adjoint

    def zeros(self) -> Given:
        return self


class OfY(Bounds):
    """What depends on y, and is differentiated."""

    def __post_init__(self) -> None:
        if not torch.is_grad_enabled():
            raise NotKnown("it computes without gradient (no_grad) what depends on y")


@dataclass(frozen=True, eq=False, repr=False)
class Affine(OfY):
    """``L y + M x + c``: ``least <= |L v| / |v| <= most``, ``|M| <= given``.

    ``cut`` says by how many entries it is shorter than y, and in which dimensions; None for any other shape. ``like_x``
    where it has the shape of x, ``like`` where it has that of an :class:`Image`; ``flat`` after ``flatten(1)``.
    """

    most: float = 1.0
    least: float = 1.0
    given: float = 0.0
    cut: frozenset[tuple[int, int]] | None = frozenset()
    like_x: bool = False
    like: Image | None = None
    flat: bool = False

    def through(self, norm: float, operator: Any, adjoint: bool) -> Affine:
        """After a linear map, an operator or its adjoint, of that norm."""
        most, given = times(self.most, norm), times(self.given, norm)
        if operator.keeps_shape:
            return _changed(self, most=most, least=0.0, given=given)
        back = self.like is not None and self.like.operator is operator and self.like.adjoint != adjoint
        return Affine(most, 0.0, given, None, like_x=back)

    def bent(self, low: float, high: float) -> Bent:
        """The sum of a function of every entry whose second derivative lies in ``[low, high]``."""
        mixed = times(max(abs(low), abs(high)), times(self.most, self.given))
        low = low * self.least**2 if low > 0 else times(low, self.most**2)
        high = high * self.least**2 if high < 0 else times(high, self.most**2)
        return Bent(low, high, mixed, flat=self.flat)

    def _mul(self, other: Any) -> Affine | Bent:
        if other is self:
            return Affine._square(self)
        if _depend_on_y(other):
            raise NotKnown("it multiplies two functions of y")
        if is_kind(other, Given):
            return Bent(0.0, 0.0, inf, linear=True)
        factor = as_number(other)
        if factor is not None:
            size = abs(factor)
            return _changed(self, most=size * self.most, least=size * self.least, given=size * self.given)
        return Affine(inf, float(other.detach().abs().min()) * self.least, self.given and inf, None)

    def _add(self, other: Any) -> Affine:
        if as_number(other) is not None:
            return _changed(self)
        if is_kind(other, Input) and self.like_x:
            return _changed(self, given=self.given + 1)
        if is_kind(other, Affine) and self.cut is not None and (self.cut, self.flat) == (other.cut, other.flat):
            least = max(sum_below([self.least, -other.most]), sum_below([other.least, -self.most]), 0.0)
            return _changed(self, most=self.most + other.most, least=least, given=self.given + other.given)
        if is_kind(other, Bent) and not other.linear:
            raise NotKnown("it adds values of a term to a tensor")
        moves = other.given if is_kind(other, Affine) else not is_kind(other, Tensor)
        given = inf if self.given or moves else 0.0
        return Affine(inf, 0.0 if is_kind(other, Affine, Bent) else self.least, given, None)

    def _square(self) -> Bent:
        return _changed(self.bent(2.0, 2.0), squares=0.0 if self.most > 0 else None)

    def _curve(self, name: str, *options: Any, **named: Any) -> Bent:
        if options or named:
            raise NotKnown(f"it uses {name!r} with options")
        return self.bent(*CURVES[name])

    def _softplus(self, beta: float = 1.0, threshold: float = 20.0) -> Bent:
        if _depend_on_y(beta, threshold) or not (beta > 0 and threshold >= 20):  # below, its slope jumps
            raise NotKnown("it uses 'softplus' with a beta that is not positive, or a threshold below 20")
        return self.bent(0.0, 0.25 * float(beta))

    def _logsumexp(self, dim: Any, keepdim: bool = False) -> Bent:
        check_within_samples(dim)
        # Its Hessian is diag(p) - p p', for probabilities p.
        return _changed(self.bent(0.0, 0.5), flat=False, summed=self.flat and dim in (1, -1) and not keepdim)

    def _linear(self, weight: Any, bias: Any = None, *_: Any, **__: Any) -> Affine:
        """After a linear map of torch's own; without its bias, which is the same for every y."""
        if _depend_on_y(weight, bias):
            raise NotKnown("it multiplies what depends on y by itself")
        if not is_kind(weight, Tensor) or is_kind(bias, Given):  # they may depend on x
            return Affine(inf, 0.0, inf, None)
        norm = largest_norm(weight)
        return Affine(times(self.most, norm), 0.0, times(self.given, norm), None)

    def _matmul(self, weight: Any) -> Affine:
        known = is_kind(weight, Tensor) and weight.ndim > 1
        return self._linear(weight.movedim(-2, 0).flatten(1) if known else weight)

    def _rmatmul(self, weight: Any) -> Affine:
        return self._linear(weight.flatten(0, -2) if is_kind(weight, Tensor) and weight.ndim > 1 else weight)

    def _reshape(self, *shape: Any, **named: Any) -> Affine:
        """The same entries in another shape."""
        if any(is_kind(part, torch.dtype) for part in (*shape, *named.values())):
            raise NotKnown("it takes entries for those of another dtype")
        return _changed(self, cut=None, like_x=False, like=None, flat=False)

    def _roll(self, *_: Any, **__: Any) -> Affine:
        return self

    def _cumsum(self, dim: Any) -> Affine:
        """Differences undo it, and their norm is below 2."""
        check_within_samples(dim)
        return _changed(self, most=times(self.most, inf), least=self.least / 2, given=times(self.given, inf))

    def _pad(self, pad: Any, mode: str = "constant", value: Any = None) -> Affine:
        if _depend_on_y(value) or is_kind(value, Given) or not all(is_kind(count, int) for count in pad):
            raise NotKnown("it pads by what depends on y or x")
        sides = [(low, high) for low, high in zip(pad[::2], pad[1::2], strict=True)]
        copies = 1 if mode == "constant" else prod(1 + max(low, 0) + max(high, 0) for low, high in sides)
        grown = frozenset((-1 - place, -low - high) for place, (low, high) in enumerate(sides) if low + high)
        least, cut = self.least if min(pad) >= 0 else 0.0, grown if self.cut == frozenset() and not self.flat else None
        return Affine(self.most * copies**0.5, least, self.given * copies**0.5, cut)

    def _sum(self, dim: Any = None, keepdim: bool = False) -> Affine:  # noqa: ARG002
        check_within_samples(dim)
        return Affine(inf, 0.0, self.given and inf, None)

    def _mean(self, dim: Any = None, keepdim: bool = False) -> Affine:  # noqa: ARG002
        check_within_samples(dim)
        return Affine(self.most, 0.0, self.given, None)

    def _flatten(self, start_dim: int = 0) -> Affine:
        check_within_samples(start_dim)
        return _changed(self, cut=self.cut if start_dim == 1 else None, like_x=False, like=None, flat=start_dim == 1)

    def _diff(self, n: int = 1, dim: int = -1) -> Affine:
        check_within_samples(dim)
        cut = frozenset({(dim, n)}) if self.cut == frozenset() and not self.flat else None
        return Affine(times(self.most, 2.0**n), 0.0, times(self.given, 2.0**n), cut)

    def __getitem__(self, index: Any) -> Affine:
        parts = index if is_kind(index, tuple) else (index,)
        if not all(part is None or part is ... or is_kind(part, int, slice) for part in parts):
            raise NotKnown("it selects entries by a tensor")
        if parts[0] is not ... and parts[0] != slice(None):
            raise NotKnown("it selects samples of the batch, or a part of a state of several tensors")
        return Affine(
            self.most, 0.0, self.given, left_out(parts) if self.cut == frozenset() and not self.flat else None
        )


@dataclass(frozen=True, eq=False, repr=False)
class Bent(OfY):
    """Entries whose sum has a Hessian by y in ``[low, high]``, and a mixed derivative by y and x of at most ``mixed``.

    ``single`` where the entries are one function of a linear map; ``summed`` where there is one per sample;
    ``repeated`` for the bounds if broadcasting repeated entries of a sum, which does no harm unless they are summed
    again. ``squares`` where the entries are sums of squares and of at least that number. ``linear`` where they are
    linear in y, weighted by what depends on x.
    """

    low: float
    high: float
    mixed: float
    single: bool = True
    summed: bool = False
    flat: bool = False
    repeated: Bent | None = None
    squares: float | None = None
    linear: bool = False

    def _settled(self) -> Bent:
        return self if self.repeated is None else self.repeated

    def _any_number_of_times(self) -> Bent:
        """If each entry may appear several times."""
        whole = self._settled()
        ends = whole.low if whole.low >= 0 else -inf, whole.high if whole.high <= 0 else inf
        return Bent(*ends, whole.mixed and inf, whole.single)

    def _mul(self, other: Any) -> Bent:
        if is_kind(other, Given):
            raise NotKnown("it weights a term by what depends on x, or by a tensor that is no parameter or buffer")
        factor = as_number(other)
        if factor is not None:
            low, high = sorted(times(factor, end) for end in (self.low, self.high))
            rest = None if self.repeated is None else self.repeated._mul(factor)
            squares = factor * self.squares if self.squares is not None and factor >= 0 else None
            mixed = times(abs(factor), self.mixed)
            return _changed(self, low=low, high=high, mixed=mixed, repeated=rest, squares=squares)
        if not self.single:
            return Bent(-inf, inf, inf)
        if _depend_on_y(other):
            raise NotKnown("it multiplies two functions of y")
        weights = float(other.detach().min()), float(other.detach().max())
        ends = [times(weight, end) for weight in weights for end in (self.low, self.high)]
        return Bent(min(ends), max(ends), times(max(map(abs, weights)), self.mixed))._any_number_of_times()

    def _add(self, other: Any) -> Affine | Bent:
        number = as_number(other)
        if number is not None:
            return _changed(self, squares=None if self.squares is None else self.squares + number)
        if is_kind(other, Affine):
            return Affine._add(other, self)
        if self.linear and (is_kind(other, Given, Tensor) or other.linear):
            return _changed(self, summed=False)
        bent = other if is_kind(other, Bent) else Bent(0.0, 0.0, 0.0)
        both, rest = self.summed and bent.summed, None
        if not both:
            one, two = self._any_number_of_times(), bent._any_number_of_times()
            rest = Bent(*one._ends_with(two), False)
        squares = None if self.squares is None or bent.squares is None else self.squares + bent.squares
        return Bent(*self._ends_with(bent), False, both, repeated=rest, squares=squares)

    def _ends_with(self, other: Bent) -> tuple[float, float, float]:
        low, high = sum_below([self.low, other.low]), sum_above([self.high, other.high])
        return low, high, sum_above([self.mixed, other.mixed])

    def _sum(self, dim: Any = None, keepdim: bool = False) -> Bent:
        check_within_samples(dim)
        squares = None if self.squares is None or self.squares < 0 else self.squares  # of any number of entries
        summed = self.flat and dim in (1, -1) and not keepdim
        return _changed(self._settled(), flat=False, summed=summed, squares=squares)

    def _sqrt(self) -> Bent:
        if self.squares is None or not self.squares > 0:
            raise NotKnown("it takes the root of what is not a sum of squares and a positive number")
        whole, slope = self._settled(), 0.5 / self.squares**0.5
        # The root of y^2 + x^2 has a mixed derivative where neither square has one: it ties what is under it together.
        mixed = times(slope, whole.mixed if whole.single else whole.mixed and inf)
        return Bent(0.0, times(slope, whole.high), mixed, whole.single, self.summed, self.flat)

    def _mean(self, dim: Any = None, keepdim: bool = False) -> Bent:  # noqa: ARG002
        check_within_samples(dim)
        whole = self._settled()
        least = SOME if whole.low > 0 else whole.low
        return Bent(least, max(whole.high, 0.0), whole.mixed, whole.single, squares=self.squares)

    def _linear(self, *_: Any, **__: Any) -> Any:
        raise NotKnown("it applies a linear map to values of a term")

    def _flatten(self, start_dim: int = 0) -> Bent:
        check_within_samples(start_dim)
        return _changed(self._settled(), flat=start_dim == 1, summed=False, squares=self.squares)

    def _reshape(self, *_: Any, **__: Any) -> Bent:
        return _changed(self._settled(), flat=False, summed=False, squares=self.squares)


def _einsum(equation: str, *operands: Any) -> Affine:
    """A contraction of what depends on y with at most one other tensor."""
    indices, arrow, out = equation.replace(" ", "").replace("...", "*").partition("->")
    pairs = sorted(zip(operands, indices.split(","), strict=True), key=lambda pair: not _depend_on_y(pair[0]))
    (y, of_y), (weight, of_weight), *others = [*pairs, (torch.ones(()), "")]
    if not arrow or not is_kind(y, Affine) or _depend_on_y(weight):
        raise NotKnown("it uses 'einsum' without '->', of y with itself, or of values of a term")
    if of_y[:1] != out[:1]:
        raise NotKnown("it joins samples of the batch")
    if len(others) > 1 or not is_kind(weight, Tensor):
        return Affine(inf, 0.0, inf, None)
    norm = contraction_norm(weight, of_weight, of_y, out)
    return Affine(times(y.most, norm), 0.0, times(y.given, norm), None)


def _depend_on_y(*values: Any) -> bool:
    for value in values:
        inside = value.values() if is_kind(value, dict) else value if is_kind(value, list, tuple) else ()
        if is_kind(value, Affine, Bent) or _depend_on_y(*inside):
            return True
    return False


def _changed(bounds: Known, **changes: Any) -> Known:
    return type(bounds)(**{**vars(bounds), **changes})

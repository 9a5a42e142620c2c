"""Checks of what the functions of a user's problem return, at every call and at the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from opteq.common.derivatives import without_saved_tensor_hooks
from opteq.states import blocks, map_state, may_branch_on_values

S = TypeVar("S")

Values = Callable[[Any], Mapping[str, Tensor]]
"""A function of a state, whose values have the batch first."""

_tried: WeakKeyDictionary[nn.Module, set[tuple[bool, bool]]] = WeakKeyDictionary()
"""Whether modules were in training mode where they were tried, and whether there was a second sample to keep apart."""


def check_start(start: S, x: Any, who: str) -> S:
    """The start of a state if it is what it should be: a tensor, or a tuple of them, batch first."""
    checked: Any = _check_tensors(start, blocks(x)[0].shape[0], f"{who}.start(x)")
    for part in blocks(checked):
        if not part.is_floating_point():
            advice = "; write a complex state as torch.view_as_real of it" if part.is_complex() else ""
            raise TypeError(f"{who}.start(x) should be floating point; got {part.dtype}{advice}")
    return start


def check_layer_features(features: S, y: Any, who: str) -> S:
    """The features at a state if they are what they should be: a tensor, or a tuple of them, batch first."""
    return _check_tensors(features, blocks(y)[0].shape[0], f"{who}.features(y)")


def _check_tensors(value: S, batch: int, who: str) -> S:
    for part in value if isinstance(value, tuple) and value else (value,):
        if not isinstance(part, Tensor) or part.shape[:1] != (batch,):
            got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"{who} should be a tensor of shape ({batch}, ...) or a tuple of them; got {got}")
    return value


def check_terms(terms: Any, batch: int, who: str) -> dict[str, Tensor]:
    """The terms of an objective if they are what they should be: names, and one value per sample each."""
    if not isinstance(terms, dict) or not terms:
        got = "an empty dict" if terms == {} else type(terms).__name__
        raise TypeError(f"{who} should return a dict from names to tensors, one value per sample each; got {got}")
    for name, values in terms.items():
        if not isinstance(values, Tensor) or values.shape != (batch,):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            which = "it" if name == "smooth" else f"{name!r}"
            raise ValueError(
                f"{who}: {which} should be one value per sample, shape ({batch},); got {got}. "
                "Sum over every dimension but the first"
            )
        if values.is_complex():
            raise TypeError(f"{who}: {name!r} should be real; got {values.dtype}. Take abs() or real")
    return terms


def try_once(module: nn.Module, function: Values, start: Any, name: str, differentiable: bool) -> None:
    """Call a function of a module where it is bound for the first time, and check that it keeps samples apart.

    It should also give the same values for the same state.

    Tensors that it keeps for later calls are then made outside of derivatives: inside, they would be torch.func's.
    With ``differentiable`` all of its values that depend on the state, and some of them, have to have a gradient.
    """
    first, tried = blocks(start)[0], _tried.setdefault(module, set())
    looks = may_branch_on_values(torch.empty(0, device="cpu")) and not torch.is_inference_mode_enabled()
    case = module.training, looks and len(first) > 1
    if case in tried:
        return
    who = f"{type(module).__name__}.{name}"
    with (
        without_saved_tensor_hooks(),  # a checkpoint would count this call
        torch.random.fork_rng([first.device] if first.is_cuda else []),
    ):
        try:
            function(start)
        except RuntimeError as error:
            if type(error) is RuntimeError:  # torch's own, of shapes mostly
                shapes = ", ".join(str(tuple(part.shape)) for part in blocks(start))
                error.args = (
                    f"{error} (in {who}; the state has shape {shapes}, as start(x): zeros like x by default)",
                )
            raise
        if looks:
            _check_repeatable(function, start, who, module)
        if looks and differentiable:
            _check_differentiable(function, start, who)
        if case[1]:
            _check_apart(function, start, who, advice_on_batch_norms(module))
    tried.add(case)


def advice_on_batch_norms(module: nn.Module) -> str:
    """What to do about those that take statistics of a batch, in words."""
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training]
    advice = "is in training mode: use a GroupNorm, keep it in evaluation mode, or apply it to x in start(x)"
    return f". Batch normalisation ({', '.join(norms)}) {advice}" if norms else ""


def _check_repeatable(function: Values, start: Any, who: str, module: nn.Module) -> None:
    """Raise where a function gives other values for the same state a second time."""
    try:
        at = map_state(lambda part: part.detach() + _ramp(part), start)
        with torch.no_grad():
            values, again = function(at), function(at)
        changed = [name for name, value in values.items() if _differ(value, again[name])]
    except Exception:  # not made for this state
        return
    if changed:
        drops = [name for name, part in module.named_modules() if isinstance(part, _DropoutNd) and part.training]
        dropout = f", such as the dropout of {', '.join(drops)}," if drops else ""
        raise ValueError(
            f"{who} gives another value for the same state each time ({changed[0]}), so there is nothing to solve for. "
            f"What is random{dropout} or changes from call to call belongs in start(x), which is called once per solve"
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """By more than the order of a sum can change."""
    one, other = (part if part.is_floating_point() else part.float() for part in (one, other))  # a count, for instance
    tolerance = max(1e-3, 8 * torch.finfo(one.dtype).eps) * one.abs().amax() if one.numel() else 0.0
    return bool(((one - other).abs() > tolerance).any())


def _check_differentiable(function: Values, start: Any, who: str) -> None:
    """Raise where no value has a gradient by the state, or one that depends on it has none."""
    try:
        at = map_state(lambda part: (part.detach() + _ramp(part)).requires_grad_(), start)
        with torch.enable_grad():
            values = function(at)
        slopes = {
            name: torch.autograd.grad(value.sum(), blocks(at), retain_graph=True, allow_unused=True)
            for name, value in values.items()
            if value.requires_grad
        }
        without = [name for name in values if all(slope is None for slope in slopes.get(name, ()))]
        with torch.no_grad():
            before = function(start) if without else {}
    except Exception:  # not made for these states
        return
    advice = "by y: it should depend on y, without detach, no_grad, data or numpy"
    if len(without) == len(values):
        raise ValueError(f"{who} has no gradient {advice}")
    for name in without:
        if _differ(values[name], before[name]):
            raise ValueError(f"{who}: {name!r} changes with y and has no gradient {advice}")


def _check_apart(function: Values, start: Any, who: str, advice: str) -> None:
    """Raise where values of one sample depend on the state of another.

    All samples but one get cotangents of zero, which stay zero whatever the rounding, unless that one comes in.
    """
    mixing = ""
    try:
        at = map_state(lambda part: (part.detach() + _ramp(part)).requires_grad_(), start)
        with torch.enable_grad():
            values = function(at)
        for name, value in values.items():
            for others in (slice(1, None), slice(None, -1)) if value.requires_grad else ():
                cotangent = _ramp(value)
                cotangent[others] = 0
                slopes = torch.autograd.grad(value, blocks(at), cotangent, retain_graph=True, allow_unused=True)
                known = [slope for slope in slopes if slope is not None]
                mixing = name if any(bool((slope[others].abs() > 0).any()) for slope in known) else mixing
    except Exception:  # not made for these states
        return
    if mixing:
        raise ValueError(
            f"{who} mixes the samples of a batch: {mixing} of one sample depends on the state of another, but each is "
            f"solved by itself. Normalise over the entries of a sample, not over the batch{advice}"
        )


def _ramp(like: Tensor) -> Tensor:
    """Numbers that differ, above 0 as some functions need."""
    return torch.linspace(0.1, 0.2, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape)

"""Models of a user's own in the registry: by name in ``create``, in recipes and in saved configurations."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from opteq.common.errors import UserError
from opteq.models.blocks.parts import Parts
from opteq.models.checks import Check, option
from opteq.models.options import Options

Builder = TypeVar("Builder", bound=Callable[..., tuple[nn.Module, nn.Module, nn.Module]])

_GIVEN = ("in_channels", "num_classes")
_PLAIN = (bool, int, float, str, list, tuple, type(None))


def options_of(function: Callable[..., Any]) -> Options:
    """The options of a function: its parameters with defaults, which have to be plain values.

    >>> def net(in_channels, num_classes, width=8): ...
    >>> options_of(net).changed({"width": 16}).plain()
    {'width': 16}
    """
    parameters = inspect.signature(function).parameters
    for name in _GIVEN:
        if name not in parameters:
            raise UserError(f"{function.__name__} should have a parameter {name}, which create() gives")
    fields: list[tuple[str, Any, Any]] = []
    for name, parameter in parameters.items():
        if name in _GIVEN:
            continue
        if hasattr(Options, name) or name in ("name", "features_only"):
            raise UserError(f"{function.__name__} can't have an option called {name}, which means something else here")
        usual = parameter.default
        if usual is parameter.empty or not isinstance(usual, _PLAIN):
            shown = "none" if usual is parameter.empty else repr(usual)
            raise UserError(
                f"the option {name} of {function.__name__} needs a default that JSON can hold (a number, a string, a "
                f"list, true, false or none), since models are saved with their options; got {shown}"
            )
        fields.append((name, Any, option(usual, _like(usual), "")))
    made = dataclasses.make_dataclass(
        f"{function.__name__}_options", fields, bases=(Options,), frozen=True, kw_only=True
    )
    options: Options = made()
    return options


def builder_of(function: Callable[..., Any]) -> Callable[[int, int, Any], Parts]:
    """``function`` as the registry calls its builders."""

    def build(in_channels: int, num_classes: int, options: Options) -> Parts:
        given = {name: getattr(options, name) for name in options.names()}
        parts = function(in_channels=in_channels, num_classes=num_classes, **given)
        if not (isinstance(parts, tuple) and len(parts) == 3 and all(isinstance(part, nn.Module) for part in parts)):
            raise TypeError(
                f"{function.__name__} should return three modules: stem, equilibrium and head; got {parts!r}"
            )
        return Parts(*parts)

    return build


def _like(usual: Any) -> Check:
    """Values of the type of the default; anything plain where that is None."""
    if usual is None:
        return Check("a plain value", lambda value: isinstance(value, _PLAIN))
    if isinstance(usual, bool):
        return Check("true or false", lambda value: isinstance(value, bool))
    if isinstance(usual, float):
        return Check("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool), float)
    if isinstance(usual, list | tuple):
        return Check("a list", lambda value: isinstance(value, list | tuple), tuple)
    return Check(
        {int: "a whole number", str: "a string"}[type(usual)],
        lambda value: isinstance(value, type(usual)) and not isinstance(value, bool),
    )

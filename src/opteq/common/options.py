"""Classes that refuse an unknown option by naming the nearest one they have."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from opteq.common.errors import did_you_mean


class NamedOptions(ABCMeta):
    """The metaclass of everything that a user constructs with options.

    Python's own message for an unknown keyword names it and stops there. This one adds the nearest right name and the
    whole list, before anything is constructed.

    >>> class Oven(metaclass=NamedOptions):
    ...     def __init__(self, degrees=180, minutes=10): ...
    >>> Oven(degree=200)
    Traceback (most recent call last):
    ...
    TypeError: Oven has no option 'degree'; did you mean 'degrees'? It takes: degrees, minutes.
    """

    other_names: Mapping[str, str] = {}
    """Other names of options, such as those of the class of torch that one is like."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        parameters = _parameters(cls)
        if cls.other_names:
            for other in cls.other_names.keys() & options.keys() - parameters.keys():
                name = cls.other_names[other]
                if name in options:
                    raise TypeError(f"{cls.__name__} got {other!r} and {name!r}, which are the same option: give one")
                options[name] = options.pop(other)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            for name in options:
                if name not in parameters:
                    hint, known = did_you_mean(name, parameters), ", ".join(parameters) or "nothing"
                    raise TypeError(f"{cls.__name__} has no option {name!r}; {hint}It takes: {known}.")
        return super().__call__(*args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of ``__init__``, for :func:`inspect.signature`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])


@functools.cache
def _parameters(cls: NamedOptions) -> Mapping[str, inspect.Parameter]:
    # Found out once: options are constructed in many calls of a layer.
    return cls.__signature__.parameters

"""Large packages that few tests use are loaded by those tests, not by every process that collects them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


class Lazy:
    """A module that is imported when one of its public names is read; pytest looks for others while it collects."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """The module ``name``, which is there but not loaded yet."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return Lazy(name)

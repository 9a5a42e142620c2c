"""Networks whose output solves an optimisation problem that a person can read and edit.

Names are loaded when the first of them is asked for: torch takes seconds to load, and whoever asks ``opteq --help``
should not wait for it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded one by one: a room that is being loaded itself may ask for another, and for all of them would be a circle.
_ROOMS = (
    "analysis", "couplings", "engine", "kernels", "models", "operators", "penalties", "plot", "potentials",
    "regularizers",
)  # fmt: skip

# Also attributes, so that `import opteq; opteq.data` works; they are not part of `from opteq import *`.
_MORE_ROOMS = ("data", "gradients", "inference", "problems", "report", "solvers", "training")

if TYPE_CHECKING:
    from opteq.api import *  # noqa: F403
else:  # a type checker would take every name for granted

    def __getattr__(name: str) -> Any:
        if name in _ROOMS or name in _MORE_ROOMS:
            return import_module(f"opteq.{name}")
        # The import system asks here for modules as well, and goes on to their files when it hears that there is no
        # such name: `from opteq import data` should not load all else.
        if find_spec(f"opteq.{name}") is None:
            front = import_module("opteq.api")
            # From now on they are attributes like any others.
            globals().update({public: getattr(front, public) for public in ("__all__", *front.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'opteq' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*globals(), *__getattr__("__all__")])

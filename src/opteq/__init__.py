"""Networks whose output solves an optimisation problem that a person can read and edit.

Names are imported at first use: torch takes seconds to import, and ``opteq --help`` should not wait for it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded one by one: importing all of them while one is being imported would be circular.
_SUBPACKAGES = (
    "analysis", "couplings", "engine", "kernels", "models", "operators", "penalties", "plot", "potentials",
    "regularizers",
)  # fmt: skip

# Also attributes, so that `import opteq; opteq.data` works; they are not part of `from opteq import *`.
_MORE_SUBPACKAGES = ("data", "gradients", "inference", "problems", "report", "solvers", "training")

if TYPE_CHECKING:
    from opteq.api import *  # noqa: F403
else:  # a type checker would take every name for granted

    def __getattr__(name: str) -> Any:
        if name in _SUBPACKAGES or name in _MORE_SUBPACKAGES:
            return import_module(f"opteq.{name}")
        # The import system looks up modules here as well, and continues with their files after an AttributeError:
        # `from opteq import data` should not import everything else.
        if find_spec(f"opteq.{name}") is None:
            api = import_module("opteq.api")
            # From now on they are attributes like any others.
            globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'opteq' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*globals(), *__getattr__("__all__")])

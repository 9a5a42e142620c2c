"""Functions that ``torch.compile`` leaves as they are, without the seconds that loading the compiler takes.

``torch.compiler.disable`` loads all of torch's compiler when a module is imported, several times what torch itself
takes, for somebody who may never compile anything.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
# Where a function keeps what the compiler makes of it. (Not in a cache of functools, which the compiler warns of.)
_DISABLED = "_opteq_disabled"
REASON = (
    "the number of solver steps depends on the data: compile without fullgraph, or export a model with a fixed number "
    "of steps (opteq export --format exported), which compiles as one graph"
)


def dynamo_disable(function: Function) -> Function:
    """``function`` as ``torch.compiler.disable`` makes it, once there is a compiler."""

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        # Who compiles a model has loaded the compiler before the model is called.
        if "torch._dynamo" not in sys.modules:
            return function(*given, **named)
        if _DISABLED not in vars(function):
            # torch 2.6 takes no reason.
            known = "reason" in inspect.signature(torch.compiler.disable).parameters
            said = {"reason": REASON} if known else {}
            setattr(function, _DISABLED, torch.compiler.disable(function, **said))  # type: ignore[no-untyped-call]
        return getattr(function, _DISABLED)(*given, **named)

    return called  # type: ignore[return-value]


def constant(function: Function) -> Function:
    """``function`` as ``torch.compiler.assume_constant_result`` makes it, which is no more than this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

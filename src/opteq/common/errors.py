"""Warnings, errors and the wording that they share."""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


class ConvergenceWarning(UserWarning):
    """An equilibrium, or the linear system of its gradient, was not solved to its tolerance."""


class ConvergenceError(RuntimeError):
    """The same as :class:`ConvergenceWarning`, raised where the caller asked for ``on_failure="raise"``.

    Also raised where a value needs an inner solve, an envelope's for instance, and that solve failed.
    """


class UserError(ValueError):
    """An error that the user can correct: a name, a file, a value. Its message is one line that says how.

    The command line prints that line and stops with status ``exit_status``, without a traceback.
    """

    exit_status = 2


class MissingExtraError(UserError, ImportError):
    """A package of one of opteq's extras is not installed."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """For imports from an extra of this package: where one is missing, the error names the command that installs it.

    Python's random state stays as it was: rich draws numbers when it is loaded.

    >>> with needs_extra("train"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    opteq.common.errors.MissingExtraError: this needs no_such_package, which is not installed: ...
    """
    state = None if _DRAWS in sys.modules else random.getstate()
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "opteq":
            raise
        message = f"this needs {package}, which is not installed: pip install 'opteq[{extra}]'"
        raise MissingExtraError(message) from error
    finally:
        if state is not None and _DRAWS in sys.modules:
            random.setstate(state)


_DRAWS = "rich.style"


def format_value(value: object) -> str:
    """A value for a message of one line: shortened where it is long; of a number of thousands of digits, words.

    >>> format_value("a" * 200)[-8:], format_value([1])
    ('aaaaa...', '[1]')
    """
    try:
        return shorten(repr(value))
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


def shorten(text: str, most: int = 100) -> str:
    """The beginning of a text that is longer than ``most``."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown_name(what: str, name: object, options: Iterable[str], listed_by: str | None = None) -> UserError:
    """The error for a name that is not among ``options``: it suggests the nearest one and lists them all.

    Where they are too many for a line, ``listed_by`` is the command that lists them.

    >>> str(unknown_name("activation", "rellu", ["relu", "tanh"]))
    "unknown activation 'rellu'; did you mean 'relu'? Known: relu, tanh."
    """
    known = sorted(options)
    rest = f"Known: {', '.join(known)}." if listed_by is None else f"`{listed_by}` lists them all"
    question = did_you_mean(str(name).lower(), known)
    return UserError(f"unknown {what} {format_value(name)}{f'; {question}' if question else '. '}{rest}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question about the nearest of the known names; empty where none is near."""
    nearest = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}? " if nearest else ""


_INSIDE = ("opteq", "torch")


def callers_level() -> int:
    """The ``stacklevel`` with which a warning names the line that called into this library, or torch on the way to it.

    Where there is no such line, in a thread of autograd's for instance, the outermost one.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 0
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _INSIDE:
            break
        frame = frame.f_back
    return level

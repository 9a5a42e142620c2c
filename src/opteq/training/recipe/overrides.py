"""``--set KEY=VALUE``: change one key of a recipe, with the type of its field."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from typing import Any, Union, get_args, get_origin

import tomlkit
from pydantic import BaseModel
from tomlkit.exceptions import ParseError

from opteq.common.errors import UserError, format_value, shorten
from opteq.training.recipe.sections import Recipe

OPEN_TABLES = ("model.options",)
"""Tables with free keys: the model refuses options that it does not have."""


def known_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a recipe with the type of its value."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def unknown_key(key: str, section: type[BaseModel] = Recipe) -> str:
    """The message for an unknown key, with the nearest known one.

    >>> unknown_key("train.epoch")
    "unknown key 'train.epoch'; did you mean 'train.epochs'?"
    >>> unknown_key("model")
    "'model' is a table of the recipe; set one of its keys: model.name, model.options"
    """
    known = [name for name, _ in known_keys(section)]
    key = shorten(key)  # it is compared with every name
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        such = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        return f"{key!r} is a table of the recipe; set one of its keys: {such}"
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not nearest:
        # A known name in the wrong table, or without one: compare the part after the last dot.
        last = {name.rpartition(".")[2]: name for name in known}
        nearest = [last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], last, n=1, cutoff=0.7)]
    if nearest:
        return f"unknown key {key!r}; did you mean {nearest[0]!r}?"
    tables = sorted({name.partition(".")[0] for name in known})
    return f"unknown key {key!r}; a recipe has: {', '.join(tables)}."


def apply(content: dict[str, Any], overrides: Iterable[str], section: type[BaseModel] = Recipe) -> dict[str, Any]:
    """``content``, as read from a recipe file, with the overrides applied. The argument stays unchanged.

    >>> apply({"train": {"epochs": 9}}, ["train.epochs=3", "data.root=/images"])
    {'train': {'epochs': 3}, 'data': {'root': '/images'}}
    """
    changed = _copied(content)
    types_of = dict(known_keys(section))
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or not text.strip():
            raise UserError(f"--set takes KEY=VALUE, such as train.epochs=20; got {format_value(override)}")
        is_open = any(key.startswith(f"{table}.") for table in OPEN_TABLES)
        if key not in types_of and not is_open:
            raise UserError(unknown_key(key, section))
        _place(changed, key, parse(text.strip(), None if is_open else types_of[key]))
    return changed


def parse(text: str, kind: Any = None) -> Any:
    """A TOML value; a word that is not TOML is a string, and ``none`` clears an optional key.

    >>> parse("[100, 150]"), parse("1e-4", float), parse("opteq-162k", str), parse("2024", str)
    ([100, 150], 0.0001, 'opteq-162k', '2024')
    """
    choices = _choices(kind)
    if text.lower() == "none" and type(None) in choices:
        return None
    try:
        value = tomlkit.parse(f"value = {text}").unwrap()["value"]
    except (ParseError, KeyError):
        return text
    wants_text = choices - {type(None)} == {str}
    return text if wants_text and not isinstance(value, str) else value


def _choices(kind: Any) -> set[Any]:
    return set(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else {kind}


def _place(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        inner = content.setdefault(table, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {shorten(key)}: {format_value(table)} is not a table of the recipe")
        content = inner
    if value is None:
        content.pop(last, None)
    else:
        content[last] = value


def _copied(content: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in content.items()}

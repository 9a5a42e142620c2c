"""TOML in and out: what recipes are written in. Python reads it, but does not write it."""

from __future__ import annotations

import json
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

TOMLDecodeError = tomllib.TOMLDecodeError


def loads(text: str) -> dict[str, Any]:
    """The content of a TOML text."""
    content: dict[str, Any] = tomllib.loads(text)
    return content


def dumps(content: dict[str, Any]) -> str:
    """A TOML text with the content: plain values first, then every table; tables inside tables are written inline.

    >>> print(dumps({"name": "x", "train": {"lr": 0.1, "options": {"bound": 2.0}}}))
    name = "x"
    <BLANKLINE>
    [train]
    lr = 0.1
    options = {bound = 2.0}
    <BLANKLINE>
    """
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lines = [f"{_key(key)} = {value_text(value)}" for key, value in content.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {value_text(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {value_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(one) for one in value) + "]"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back as the same number; inf and nan are TOML's words too
    if isinstance(value, bool | int | str):
        # JSON's strings, whole numbers and booleans are TOML's as well; DEL alone has to be escaped besides.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return json.dumps(str(value))


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)

"""Tables inside tables, such as recipes."""

from __future__ import annotations

from typing import Any


def flattened(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flattened({"train": {"epochs": 3}, "name": "x"})
    {'train.epochs': 3, 'name': 'x'}
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

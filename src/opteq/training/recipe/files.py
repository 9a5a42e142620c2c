"""Recipe files: those of the package by name, others by path, and the copy in a run folder."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError
from tomlkit.exceptions import ParseError

from opteq.common.errors import UserError, format_value, shorten, unknown_name
from opteq.common.nested import flattened
from opteq.training.recipe import overrides as override
from opteq.training.recipe.denoising import DenoisingRecipe
from opteq.training.recipe.sections import Recipe

_WITHOUT_EFFECT = frozenset({
    "name", "reproduces", "data.root", "data.cache", "train.device", "train.threads", "train.checkpoint_steps",
    "train.test_batch_size",
})  # fmt: skip
"""Keys that do not change what is trained; a recipe in which others were changed does not claim its result."""

_FOLDER = Path(str(resources.files("opteq"))) / "recipes"


AnyRecipe = Recipe | DenoisingRecipe
"""Recipes that a file may contain."""


def recipes(denoising: bool = False) -> list[str]:
    """The names of the package's recipes, those that train classifiers and segmenters or those that train denoisers.

    >>> "digits" in recipes()
    True
    """
    return sorted(name for name, path in _files().items() if (path.parent.name == "denoising") == denoising)


@cache
def _files() -> dict[str, Path]:
    """The package's recipes by name; folders group them."""
    return {path.name.removesuffix(".toml"): path for path in _FOLDER.rglob("*.toml")}


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """:func:`load_any_recipe` of a classifier or segmenter; a recipe of a denoiser is refused.

    >>> load_recipe("digits", ["train.epochs=3"]).train.epochs
    3
    """
    recipe = load_any_recipe(name_or_path, overrides)
    if not isinstance(recipe, Recipe):
        raise UserError(f"the recipe {recipe.name} trains a denoiser, and this needs a classifier or a segmenter")
    return recipe


def load_any_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> AnyRecipe:
    """A recipe of the package, or of a file where a path (anything with a slash or ``.toml``) is given.

    Args:
        name_or_path: such as ``digits`` or ``my/recipe.toml``.
        overrides: ``"key=value"`` each, such as ``train.epochs=20``; see :mod:`opteq.training.recipe.overrides`.

    Raises:
        UserError: an unknown recipe, or a wrong key or value.
    """
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or isinstance(name_or_path, Path):
        path = Path(name_or_path)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"the recipe {path} cannot be read: {reason}") from error
        where = str(path)
    else:
        if text not in _files():
            raise unknown_name("recipe", text, sorted(_files()), listed_by="opteq recipes")
        source = _files()[text].read_text(encoding="utf-8")
        where = text
    try:
        content = tomlkit.parse(source).unwrap()
    except ParseError as error:
        raise UserError(f"the recipe {where} is not valid TOML: {error}") from error
    if (task := content.get("task", "denoising")) != "denoising":
        raise UserError(
            f"recipe {where}: task = {format_value(task)} is not right: it should be 'denoising', or left out for "
            "classifiers and segmenters"
        )
    kind = DenoisingRecipe if "task" in content else Recipe
    changed = override.apply(content, overrides, kind)
    if _differ(content, changed) and content.get("reproduces") == changed.get("reproduces"):
        # The published result is that of the recipe as it was.
        changed.pop("reproduces", None)
    return _validated(changed, kind, where)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two recipes differ in more than where things lie and how fast they run."""
    old, new = flattened(before), flattened(after)
    return any(old.get(key) != new.get(key) for key in (old.keys() | new.keys()) - _WITHOUT_EFFECT)


def to_toml(recipe: AnyRecipe) -> str:
    """The recipe as a TOML file that :func:`load_recipe` reads back as the same recipe."""
    content = recipe.model_dump(exclude_none=True)
    for key, value in flattened(content).items():
        # File names are bytes and may not be valid Unicode.
        if isinstance(value, str) and value.encode(errors="replace").decode() != value:
            raise UserError(
                f"{key} = {value!a} is not valid Unicode, as recipes have to be: use another name, or a link"
            )
    return tomlkit.dumps(content)


_WORDS = {
    **dict.fromkeys(("list_type", "tuple_type"), "it should be a list in brackets, such as [1, 2]"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "it should be true or false"),
    "dict_type": "it should be a table of options",
    "too_short": "it should have at least 1 entry",
    "string_pattern_mismatch": "it should consist of letters, digits, '.', '_' and '-', a letter or digit first",
}
"""Reasons in words of TOML, by the kinds of pydantic's errors."""


def _validated(content: dict[str, Any], kind: type[Recipe] | type[DenoisingRecipe], where: str) -> AnyRecipe:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # A misspelt key is also a missing one; report the misspelling.
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        more = error.error_count() - 1
        rest = f" (and {more} more)" if more else ""
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and not part.startswith("function-"))
        if first["type"] == "extra_forbidden":
            ours = ", perhaps of another version of opteq" if where.endswith("/recipe.toml") else ""
            raise UserError(f"recipe {where}{ours}: {override.unknown_key(key, kind)}{rest}") from None
        if first["type"] == "missing":
            raise UserError(f"recipe {where}: the key {format_value(key)} is missing{rest}") from None
        key = shorten(key)
        said = _WORDS.get(
            first["type"], first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        )
        reason = shorten(said, 500)
        if isinstance(first["input"], dict):
            section = f"[{key}] " if key else ""  # of a rule over several sections there is none
            raise UserError(f"recipe {where}: {section}{reason}{rest}") from None
        value = shorten(tomlkit.item(first["input"]).as_string())
        raise UserError(f"recipe {where}: {key} = {value} is not right: {reason}{rest}") from None

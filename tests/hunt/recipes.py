"""Recipes that break something, hang, or are refused in many words."""

from __future__ import annotations

import tempfile
from pathlib import Path

import opteq.models
from hunt.damage import HOSTILE, damaged, mutated, refused_in_a_line
from hunt.drawing import Draw, require
from opteq.models.denoiser import Denoiser
from opteq.models.meta_device import on_meta_device


def hunt(draw: Draw) -> str:
    """One recipe with something wrong in it, or with hostile overrides: refused in a line, or whole."""
    from opteq.common.nested import flattened
    from opteq.training import recipes  # says in one line what is missing
    from opteq.training.recipe.denoising import DenoisingRecipe
    from opteq.training.recipe.files import load_any_recipe, to_toml

    name = draw.one_of(recipes(denoising=draw.chance(0.2)))
    whole = load_any_recipe(name)
    overrides: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        source: str | Path = name
        if draw.chance(0.6):
            source, what = _written(draw, to_toml(whole), Path(folder) / "recipe.toml")
        else:
            keys = list(flattened(whole.model_dump(mode="json")))
            overrides = [_override(draw, keys) for _ in range(draw.whole(1, 3))]
            what = str(overrides)
        about = f"{name}: {what[:600]}"
        with refused_in_a_line(about):
            recipe = load_any_recipe(source, overrides)
            kept = Path(folder) / "kept.toml"
            kept.write_text(to_toml(recipe), encoding="utf-8")
            require(
                to_toml(load_any_recipe(kept)) == to_toml(recipe),
                f"a recipe changed when it was written and read: {about}",
            )
            with on_meta_device():  # models may be larger than memory
                if isinstance(recipe, DenoisingRecipe):
                    Denoiser(recipe.model.config(recipe.noise))
                else:
                    recipe.augmentation()
                    opteq.models.create(recipe.model.name, **recipe.model.options)
    return "override" if overrides else "file"


def _written(draw: Draw, content: str, path: Path) -> tuple[Path, str]:
    """A recipe's file with damage, or with other values; and what was done."""
    import tomlkit

    if draw.chance(0.3):
        changed, what = damaged(draw, content.encode())
        path.write_bytes(changed)
        return path, what
    value = mutated(draw, tomlkit.parse(content).unwrap())
    try:
        text = tomlkit.dumps(value)
    except Exception:  # not all hostile values are TOML
        text = "name = nothing"
    path.write_text(text, encoding="utf-8", errors="replace")
    return path, text


def _override(draw: Draw, keys: list[str]) -> str:
    options = ["model.options.channels", "model.options.hidden", "model.options.stem_depth", "", "a.b.c"]
    key = draw.one_of([*keys, *options])
    key = key[:-1] if draw.chance(0.1) else key
    try:
        value = str(draw.one_of(HOSTILE))
    except ValueError:  # a number that Python does not write
        value = "9" * 5000
    return f"{key}={value}" if draw.chance(0.95) else key + value

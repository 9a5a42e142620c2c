"""The index of the papers says what is true: commands parse, recipes and tests exist, counts are right."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path

from typer.main import get_command

from opteq import data, models
from opteq.cli import app
from opteq.models.registry import sketched
from opteq.report.figures import FIGURES
from opteq.training import load_recipe, recipes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "papers.md"


@cache
def rows() -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines]
    return [row for row in found if row[0] != "row"]


def test_commands_parse() -> None:
    commands = sorted({row[2].strip("`") for row in rows() if row[2].startswith("`opteq ")})
    built: set[tuple[str, ...]] = set()
    for command in commands:
        program, action, name, *rest = shlex.split(command)
        assert program == "opteq", command
        if action == "unrolling":
            load_recipe(name)
            assert not rest, command
            continue
        if action != "train":
            check_measurement(action, name, rest)
            continue
        assert rest[::2] == ["--set"] * (len(rest) // 2), command
        recipe = load_recipe(name, rest[1::2])
        assert recipe.data.name in data.names(), command
        keys = (recipe.model.name, *(override.partition("=")[0] for override in rest[1::2]))
        if keys in built or len(keys) == 1:  # recipes as they are have a test of their own
            continue
        built.add(keys)
        usual = models.describe(recipe.model.name).options
        given = recipe.model.options.items()
        options = {key: None if value == "none" and not isinstance(usual[key], str) else value for key, value in given}
        with sketched():
            models.create(recipe.model.name, **options)


def check_measurement(action: str, name: str, options: list[str]) -> None:
    """A command about finished runs: its options parse, its figures exist, and each run has a recipe."""
    program = get_command(app)
    given = program.commands[action].make_context(action, [name, *options]).params  # type: ignore[attr-defined]
    assert (action, given["only"] or []) == (action, [one for one in given["only"] or [] if one in FIGURES])
    assert action == "figures" or given["corruptions"] or given["curves"]
    for run in [*given.get("runs", [given.get("run")]), *filter(None, [given.get("reference")])]:
        assert run.parent == Path("runs"), run
        # The run of a recipe as it is, or with a setting, which its name ends with.
        assert run.name in recipes() or any(run.name.startswith(f"{recipe}-") for recipe in recipes()), run


def test_tests_exist() -> None:
    named = [row[2].strip("`") for row in rows() if row[3] == "tested"]
    assert named
    for test in named:
        file, _, function = test.partition("::")
        source = (ROOT / file).read_text()
        assert not function or re.search(rf"^def {function}\(", source, re.MULTILINE), test


def test_every_row_has_a_status_and_the_counts_are_right() -> None:
    kinds = Counter(re.split("[;:]", row[3])[0] for row in rows())
    assert set(kinds) <= {"tested", "recipe", "missing"}
    assert all(bool(row[2]) != row[3].startswith("missing") for row in rows())
    said = f"{kinds['tested']} rows are tested, {kinds['recipe']} have a command, {kinds['missing']} are missing."
    assert said in PAGE.read_text()

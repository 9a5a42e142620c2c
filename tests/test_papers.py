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
from opteq.models.registry import on_meta_device
from opteq.report.figures import FIGURES
from opteq.training import load_recipe

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "papers.md"


NUMBERED = {  # what the papers number, by what a row says
    "OptEq": {"Lemma": 3, "Theorem": 6, "Corollary": 1, "Assumption": 2, "Remark": 2, "Algorithm": 1, "Table": 10},
    "MOptEq": {"Proposition": 2, "Assumption": 1, "Algorithm": 2, "Table": 6, "Figure": 4},
    "GEQ": {"Proposition": 4, "Lemma": 3, "Remark": 3, "Algorithm": 1, "Table": 5, "Figure": 4},
}


def cells(text: str) -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines][1:]


@cache
def sections() -> dict[str, list[list[str]]]:
    """The tables by their headings, as rows of cells."""
    parts = re.split(r"^## (\w+).*$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: cells(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def rows() -> list[list[str]]:
    """Those of the papers."""
    return [row for paper in NUMBERED for row in sections()[paper]]


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
        if "--out" in rest:
            rest = rest[:-2]
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
        with on_meta_device():
            models.create(recipe.model.name, **options)


def check_measurement(action: str, name: str, options: list[str]) -> None:
    """A command about finished runs: its options parse, its figures exist, and a row trains each run."""
    program = get_command(app)
    given = program.commands[action].make_context(action, [name, *options]).params  # type: ignore[attr-defined]
    assert (action, given["only"] or []) == (action, [one for one in given["only"] or [] if one in FIGURES])
    assert action == "figures" or given["corruptions"] or given["curves"]
    for run in [*given.get("runs", [given.get("run")]), *filter(None, [given.get("reference")])]:
        assert str(run) in trained_runs(), run


@cache
def trained_runs() -> dict[str, str]:
    """The folder of every training of the page, and its command."""
    found: dict[str, str] = {}
    for command in (row[2].strip("`") for row in rows() if row[2].startswith("`opteq train ")):
        _, _, name, *rest = shlex.split(command)
        folder = rest[-1] if rest[-2:-1] == ["--out"] else f"runs/{name}"
        assert found.setdefault(folder, command) == command, folder
    return found


def test_trainings_have_folders_of_their_own() -> None:
    """In a folder that holds a run, the next one is refused."""
    assert len(trained_runs()) > 100


def test_tests_exist() -> None:
    named = [row[2].strip("`") for row in rows() if row[3].startswith("tested")]
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


def test_nothing_that_the_papers_number_is_left_out() -> None:
    for paper, kinds in NUMBERED.items():
        named = [row[0] for row in sections()[paper]]
        for kind, count in kinds.items():
            found = {int(n) for name in named for n in numbers(kind, name)}
            assert found == set(range(1, count + 1)), (paper, kind)


def numbers(kind: str, name: str) -> list[str]:
    """The numbers after a word in the singular or plural: "Table 3, 5: alpha 0.4" has 3 and 5."""
    said = re.findall(rf"{kind}s? (\d+\w?(?:, \d+\w?)*)", name)
    return [re.sub(r"\D", "", one) for group in said for one in group.split(", ")]


def test_figures_of_ours_are_those_of_the_results() -> None:
    claims = [(row[0], found) for row in rows() for found in re.findall(r"\[here\]\(\.\./(\S+)\) ([\d., ]+) %", row[3])]
    assert claims
    for name, (page, figures) in claims:
        tables = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
        for figure in figures.split(", "):  # prose may name one that another run has replaced
            assert any(f" {figure} %" in line or f"*{figure} %" in line for line in tables), (name, figure)


def test_sizes_are_those_of_the_models() -> None:
    listed = {row[0]: row for row in sections()["Sizes"]}
    for name, (_, printed, here, _) in listed.items():
        assert here == f"{models.describe(name).parameters:,}"
        assert re.fullmatch(r"[\d.]+[kM]", printed)
    with_size = {name for name in models.list() if models.describe(name).reproduces and "cityscapes" not in name}
    assert with_size <= set(listed)

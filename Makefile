# Two commands do everything on a machine that has Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format bench slow gpu clean

# Trains a classifier on the embedded digits and leaves a page to open; a second call goes on where the first stopped.
demo: $(STAMP)
	$(BIN)/opteq train digits --out runs/digits --resume

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n auto --timeout 300 -m "not slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

# Options by BENCH, such as `make bench BENCH='--device cpu --no-models'`.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	PYTHONPATH=benchmarks $(BIN)/python -m opteq_bench $(BENCH)

# The pinned torch goes in first: a range that admits a newer one would fetch gigabytes of CUDA libraries. Nothing is
# compiled ahead: most files of most packages are never imported.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

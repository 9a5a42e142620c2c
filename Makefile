# Two commands do everything on a machine that has Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# The tests of one file run in one process: what they load and train for all of them is made once. Long files begin
# (tests/conftest.py); by itself xdist would begin with those of many tests.
PYTEST := $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder
# Bytecode is kept: the processes that tests start load it in a third of the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all quick gpu lint format bench hunt docs dist clean

# Trains a classifier on the digits of the package and writes a report; a second call resumes where the first stopped.
demo: $(VENV)/.demo
	$(BIN)/opteq train digits --out runs/digits --resume

# The type checker runs beside the tests: it takes one core for as long as they take two to begin.
test: $(VENV)/.test
	$(MAKE) --no-print-directory --jobs 2 lint quick

# The same and the slow tests, such as whole trainings.
test-all: $(VENV)/.test lint
	$(PYTEST) --timeout 900 -m "not gpu"

quick: $(VENV)/.test
	$(PYTEST) --timeout 300 -m "not slow and not gpu"

# Several processes share the GPU: the tests wait for the host most of the time.
gpu: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 4 --dist worksteal -m gpu

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Options by BENCH, such as `make bench BENCH='--device cpu --no-models'`.
bench: $(VENV)/.bench
	PYTHONPATH=benchmarks $(BIN)/python -m opteq_bench $(BENCH)

# Random problems, gradients, certificates, files and recipes against independent oracles; a second call goes on. A case
# that failed is run again by `make hunt SEED=...`, as its report says. Options by HUNT, such as HUNT='--kills 10'.
MINUTES ?= 5
SEED ?= 0
hunt: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m hunt --minutes $(MINUTES) --seed $(SEED) $(HUNT)

# The site goes to build/site; it is built, and read, without a network. Open build/site/index.html; for the search,
# which browsers refuse to files, `python3 -m http.server --directory build/site`.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/images.py
	$(BIN)/python docs/site/gallery.py
	$(BIN)/mkdocs build --strict

# What a release uploads: a wheel and an sdist, checked.
dist: $(VENV)/.test
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

$(VENV)/.demo: EXTRAS := all
$(VENV)/.test: EXTRAS := test
$(VENV)/.bench: EXTRAS := bench
$(VENV)/.docs: EXTRAS := docs
# The pip that comes with Python takes half as long again as a new one. Nothing is compiled ahead, as most files of most
# packages are never imported, but what torch needs to train: all workers of the tests would compile it at once, and pip
# leaves a core idle. With its build tools installed, no environment is made to build the package in.
$(VENV)/.demo $(VENV)/.test $(VENV)/.bench $(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) hatchling editables numpy torch
	$(BIN)/python -c "import torch._dynamo" & $(PIP) --no-build-isolation --editable '.[$(EXTRAS)]' && wait $$!
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each target works on a fresh clone: it makes .venv and installs what it needs, then runs.
# What is installed is remembered in .venv/.installed-*, so a second run needs no network.
# torch comes from wherever pip is set to look. On Linux the usual build brings the CUDA libraries;
# to save gigabytes on a machine without a GPU, set pip to PyTorch's CPU wheels first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHMARKS ?= bench/step_time.py bench/overhead.py bench/elastic.py bench/checkpoints.py bench/accuracy.py bench/stragglers bench/pipeline

# Extras that start workers elsewhere. One that cannot be installed is said, and its tests are skipped.
ENGINES := mpi ray spark

# Three at a time: most tests wait for their workers. A file stays together, so what its tests share is made once.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile

# Without compiled files, each process of pytest would rewrite all tests anew: 7 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-places test-rest test-all check bench docs dist format clean

help:
	@echo 'make demo     train a small model on 1, 2 and more workers and compare the results'
	@echo 'make test     run the quick tests, in minutes'
	@echo 'make test-all run all tests'
	@echo 'make test-slow   run the slow tests'
	@echo 'make test-places run those that need an engine: Slurm, MPI, ...'
	@echo 'make test-rest   run both, side by side'
	@echo 'make check    formatting, lint, types, import rules'
	@echo 'make bench    measure against other libraries'
	@echo 'make docs     build the documentation into site/'
	@echo 'make dist     build the packages of a release, and its SBOM, into dist/'
	@echo 'make format   format the code'
	@echo 'make clean    remove what was built (.venv stays)'

demo: $(VENV)/.installed-demo
	$(BIN)/paceline demo

# On the CPU, also where there is a GPU; `pytest -m cuda` runs the tests for one.
test: $(VENV)/.installed-dev
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m 'not slow and not place'

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m 'slow and not place'

# Slurm, MPI and others where they are installed; the rest is skipped.
test-places: $(VENV)/.installed-dev $(VENV)/.installed-places $(VENV)/.installed-engines
	$(PYTEST) -n 2 -m place

# What `make test` leaves out. Engines keep their tests waiting, so the slow ones run beside them.
test-rest: $(VENV)/.installed-dev $(VENV)/.installed-places $(VENV)/.installed-engines
	$(PYTEST) -m 'slow or place'

test-all: test test-rest

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench
	@set -e; for script in $(BENCHMARKS); do echo "$(BIN)/python $$script"; $(BIN)/python "$$script"; done

docs: $(VENV)/.installed-docs
	SITE_NAME="Paceline $$($(BIN)/python -c 'import paceline; print(paceline.__version__)')" \
	  NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The time of the last commit, so that the same commit gives the same bytes.
dist: $(VENV)/.installed-dev
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python .ci/dist.py dist

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist site test-failures *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.installed-engines: $(VENV)/.installed-places
	@for engine in $(ENGINES); do \
	  echo "Installing paceline[$$engine] into $(VENV); this takes minutes."; \
	  $(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[$$engine]" \
	    || echo "paceline[$$engine] could not be installed." >&2; \
	done
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing paceline[$*] into $(VENV); the first time takes a minute or more.'
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'No $(PYTHON) here. Install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    'Name a newer one: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

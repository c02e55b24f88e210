# Everything runs in .venv, which is made on first use. All that is needed is make and Python 3.11 or newer.
#   make demo      capture three prompts of a real model, replay a grid, draw
#   make test      linters, types, import rules, all tests but the slow ones (ten minutes)
#   make slow      the slow tests: kills at random moments, how often intervals cover the truth (three minutes)
#   make figures   redraw figures/ from the committed traces (analysis/figures_*.py)
#   make gpu       the checks that need a CUDA device
#   make engines   asdsim inside vLLM on CPU, in an environment of its own (3.4 GB on the first run)
#   make browser   the page of asdsim report in a real browser (Debian's chromium; node for axe-core)
#   make cluster   a Ray cluster beside one process, and kill -9 of replicas, drivers and raylets (some minutes)
#   make bench     timings beside plain Python, torch and numpy (make micro: of the walk's pieces)
#   make docs      the site, in docs/_build; a warning or a broken link between pages is an error
#   make mutants   would the tests notice small changes of meaning (some ten minutes; MUTANTS="studies cli" for a part)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Stamps are written last, so an install that was cut short is not taken for a finished one.
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Test processes; each keeps to one thread.
WORKERS ?= 2
PYTEST_ARGS ?=

export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba
export RUFF_CACHE_DIR := $(CURDIR)/.cache/ruff
test slow gpu browser cluster: export OMP_NUM_THREADS := 1
# No test may reach a model hub.
test slow gpu browser cluster: export HF_HUB_OFFLINE := 1
test slow gpu browser cluster: export TRANSFORMERS_OFFLINE := 1
test slow gpu browser cluster: export HF_DATASETS_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test lint docs figures gpu engines cluster bench micro mutants slow clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(RUN_READY)
	$(BIN)/asdsim demo -o demo-out

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -p no:benchmark -m 'not slow' $(PYTEST_ARGS)

slow: $(DEV_READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -p no:benchmark -m slow $(PYTEST_ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .cache/import-linter

docs: $(DEV_READY)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

figures: $(RUN_READY)
	for script in analysis/figures_*.py; do echo "$$script"; $(BIN)/python "$$script"; done

gpu: $(DEV_READY)
	$(BIN)/python -m tests.gpu

engines: $(DEV_READY)
	PYTHON=$(CURDIR)/$(BIN)/python tests/engines/run_vllm.sh

# The checks skip what is not there, so say so here.
browser: $(DEV_READY)
	@command -v chromium >/dev/null || { echo "error: no chromium on the PATH (Debian: apt-get install chromium)" >&2; exit 2; }
	$(PIP) -e '.[browser]'
	[ -e .cache/browser/node_modules/axe-core ] || npm install --silent --no-audit --no-fund --prefix .cache/browser axe-core@4
	$(BIN)/python -m pytest tests/browser -o python_files='check_*.py' $(PYTEST_ARGS)

cluster: $(DEV_READY)
	$(BIN)/python -m pytest tests/cluster -s -o python_files='check_*.py' $(PYTEST_ARGS)

mutants: $(DEV_READY)
	$(BIN)/python tests/mutants.py $(MUTANTS)

bench: $(RUN_READY)
	$(BIN)/asdsim bench

micro: $(DEV_READY)
	$(BIN)/python -m pytest tests/bench -o python_files='bench_*.py' --benchmark-columns=median,iqr,rounds $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) .cache demo-out bench-out build dist docs/_build

# A directory without its own stamp is the rest of an attempt that failed: begin again.
$(VENV)/.made:
	@rm -rf $(VENV)
	@python=; for name in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	  if "$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python >= 3.11 with venv on the PATH; install one, or run make PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	echo "making $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV)
	@touch $@

$(RUN_READY): pyproject.toml constraints.txt | $(VENV)/.made
	@rm -f $@
	@echo "installing asdsim with what runs models; the first time takes some minutes"
	$(PIP) -e '.[capture]'
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt | $(VENV)/.made
	@rm -f $@
	@echo "installing asdsim with everything that its tests need; the first time takes some minutes"
	$(PIP) -e '.[capture,cuda13,dev]'
	@touch $(RUN_READY) $@

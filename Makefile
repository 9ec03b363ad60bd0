# `make demo` and `make test` work from a fresh clone: each makes the virtual environment when it is missing.

PYTHON ?= python3
VENV ?= .venv
# Further arguments for pip, for example an index that has CPU builds of torch.
PIP_ARGS ?=
# Test processes; each computes with one thread.
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
DEMO_EXTRAS := $(if $(filter-out 0,$(GPUS)),demo gpu,demo)
comma := ,
empty :=
space := $(empty) $(empty)

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   install, build small inputs, train a LoRA, show the audit and the loss curve"
	@echo "make test   install and run the tests"
	@echo "make lint   check the style"
	@echo "make bench  time the transformer and the whole training step"
	@echo "make clean  remove $(VENV) and everything the other targets wrote"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: setup.py constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), which takes a few minutes the first time ..."
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[$(subst $(space),$(comma),$(DEMO_EXTRAS))]'
	@touch $@

$(VENV)/.dev: setup.py constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), which takes a few minutes the first time ..."
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .

bench: $(VENV)/.dev
	@mkdir -p benchmark_output
	$(BIN)/python benchmarks/step_time.py --json benchmark_output/step_time.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/step_overhead.py --json benchmark_output/step_overhead.json
	$(BIN)/python benchmarks/audit_cost.py --json benchmark_output/audit_cost.json

clean:
	rm -rf $(VENV) build dist *.egg-info demo_output benchmark_output .pytest_cache .ruff_cache .hypothesis

# Two commands for newcomers: make demo, make test. Both set up .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST := .venv-oldest/transformers
# The version tested. Which build comes (CPU or CUDA) is the package index's choice.
TORCH ?= torch==2.13.0

.PHONY: demo test lint test-fast test-oldest test-slow bench

$(READY): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint test-fast test-oldest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-fast: $(READY)
	$(BIN)/pytest

# The low end of the transformers range we declare, beside everything else of the environment.
$(OLDEST): $(READY)
	rm -rf .venv-oldest
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
	  --target .venv-oldest transformers==5.19.0

test-oldest: $(OLDEST)
	PYTHONPATH=.venv-oldest $(BIN)/pytest

test-slow: $(READY)
	$(BIN)/pytest -m slow

bench: $(READY)
	for name in compose extract ttft methods train_step; do $(BIN)/python benchmarks/$$name.py --check || exit 1; done

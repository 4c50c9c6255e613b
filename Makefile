# Each target sets up what it needs: a virtual environment with the pinned dependencies.

# What is pinned is for Python 3.11. The system's is looked at first: distributions optimize theirs
# with a profile, version managers that build from source do not, and those are a tenth slower.
PYTHON ?= $(firstword $(shell for python in /usr/bin/python3 python3; do \
	$$python -c "import ensurepip, sys; assert sys.version_info[:2] == (3, 11)" 2> /dev/null \
	&& echo $$python; done) python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types conformance matrix bench format clean

demo: $(READY)
	$(BIN)/gradwire run -n 3 examples/quickstart.py

test: lint types
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# torch's own tests of its RPC, against gradwire; a representative third is part of `test`.
conformance: $(READY)
	$(BIN)/python -m conformance

# The suite on the oldest and the newest Python and torch, and on two in the middle. It installs some
# gigabytes into the user's cache folder.
matrix:
	$(PYTHON) -m tests.matrix

bench: $(READY)
	$(BIN)/gradwire bench rpc
	$(BIN)/gradwire bench autograd
	$(BIN)/gradwire bench programs
	mkdir -p build
	$(BIN)/gradwire bench scale --json build/scale.json
	$(BIN)/gradwire plot build/scale.json --into docs/plots

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch is pinned and installed first, by itself: an open range would fetch a CUDA build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch setuptools
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[dev,closures,plots]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Two commands: `make quickstart` and `make test`. Each makes .venv itself.
#   PYTHON=python3.12 chooses the interpreter, JAX=0.11.2 the jax version, TESTS=... what pytest runs.

PYTHON ?= python3
VENV ?= .venv
JAX ?=
TESTS ?= tests
CONSTRAINTS := $(if $(JAX),,-c constraints.txt)
JAX_PIN := $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
UV := $(shell command -v uv 2>/dev/null)
INSTALL = $(if $(UV),$(UV) pip install --python $(VENV)/bin/python,$(VENV)/bin/python -m pip install --quiet)
STAMP = $(VENV)/installed$(if $(JAX),-jax-$(JAX))

.PHONY: quickstart install test test-slow lint clean

quickstart: install
	$(VENV)/bin/python -m jaxlm.train --config_path config/quickstart.yaml

install: $(STAMP)

test: $(STAMP)-test
	$(VENV)/bin/python -m pytest $(TESTS)

test-slow: $(STAMP)-test
	$(VENV)/bin/python -m pytest -m slow $(TESTS)

lint: $(STAMP)-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

$(VENV)/bin/python:
	$(if $(UV),$(UV) venv --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))

$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) $(CONSTRAINTS) $(JAX_PIN) -e .
	touch $@

$(STAMP)-test: $(STAMP)
	$(INSTALL) $(CONSTRAINTS) $(JAX_PIN) -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV)

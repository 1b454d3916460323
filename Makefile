# Two commands: `make quickstart` and `make test`. Each makes the virtual environment itself.
#   PYTHON=python3.12 chooses the interpreter, JAX=0.11.2 the jax version, TESTS=tests/engine what pytest runs,
#   JOBS=4 how many processes share the tests, EXTRAS=test,torch,hf compares with torch and transformers too,
#   VENV=DIR another environment (PYTHON, JAX and EXTRAS count when it is made).

PYTHON ?= python3
VENV ?= .venv
JAX ?=
TESTS ?= tests
JOBS ?= 2
EXTRAS ?= test
UV := $(shell command -v uv 2>/dev/null)
INSTALL = $(if $(UV),$(UV) pip install --python $(VENV)/bin/python,$(VENV)/bin/python -m pip install --quiet)
# With a jax of one's own, what must follow it is left to the installer.
CONSTRAIN = $(if $(JAX),sed -E '/^(jax|jaxlib|flax|numpy)=/d' constraints.txt && echo jax==$(JAX),cat constraints.txt)

.PHONY: quickstart test test-slow lint docs clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python -m jaxlm.train --config_path config/quickstart.yaml

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) $(TESTS)

test-slow: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) -m slow $(TESTS)

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --site-dir build/site

$(VENV)/constraints.txt: constraints.txt
	$(if $(UV),$(UV) venv --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))
	($(CONSTRAIN)) > $@

$(VENV)/installed: $(VENV)/constraints.txt pyproject.toml
	$(INSTALL) -c $(VENV)/constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV)

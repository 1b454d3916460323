# `make quickstart` and `make test` are the main commands. Each target creates the virtual environment if it is missing.
#   VENV=DIR              selects the environment; PYTHON, JAX and EXTRAS apply when it is created
#   PYTHON=python3.12     selects the interpreter
#   JAX=0.11.2            selects the jax version
#   EXTRAS=test,torch,hf  also installs torch and transformers, which many tests compare with
#   TESTS=tests/engine    selects the tests
#   JOBS=4                sets the number of test processes, SLOW_JOBS=4 that of the slow tests
#   WING=rl               selects the wing that `make without` deletes from a copy, before it checks the core
#   PARTS=static          selects what `make without` checks there: static,tests

PYTHON ?= python3
VENV ?= .venv
JAX ?=
TESTS ?= tests
JOBS ?= 2
# One more, because slow tests start processes and wait for them. Four are no faster.
SLOW_JOBS ?= 3
EXTRAS ?= test
WING ?= all
PARTS ?= static,tests
UV := $(shell command -v uv 2>/dev/null)
INSTALL = $(if $(UV),$(UV) pip install --python $(VENV)/bin/python,$(VENV)/bin/python -m pip install --quiet)
# With JAX=..., the installer chooses the versions of the packages that depend on the jax version.
CONSTRAIN = $(if $(JAX),sed -E '/^(jax|jaxlib|flax|numpy)=/d' constraints.txt && echo jax==$(JAX),cat constraints.txt)

.PHONY: quickstart test test-slow without lint docs clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python -m jaxlm.train --config_path config/quickstart.yaml
	@echo
	@echo 'The command `jaxlm` is in $(VENV)/bin. To use it in this shell: source $(VENV)/bin/activate'

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) $(TESTS)

test-slow: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(SLOW_JOBS) -m "slow and not soak" $(TESTS)

without: $(VENV)/installed-test
	$(VENV)/bin/python benchmarks/without.py $(WING) --only $(PARTS) --jobs $(JOBS)

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

docs: $(VENV)/installed-docs
	# Not with --quiet, under which --strict overlooks all warnings.
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --site-dir build/site

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

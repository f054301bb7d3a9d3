# Every target makes the virtual environment it needs; a second call starts at once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help setup test lint docs wheel reproduce clean

help:  ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# The study alone: what `make reproduce` needs.
$(VENV)/.study: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e '.[study]'
	@touch $@

# Everything: the tests, the linters and the peers (whose own torchvision is not wanted, hence --no-deps).
$(VENV)/.dev: pyproject.toml constraints.txt requirements-peers.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps -r requirements-peers.txt
	@touch $@ $(VENV)/.study

setup: $(VENV)/.dev  ## install everything into .venv

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.dev  ## build the documentation into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_links.py site

wheel: $(VENV)/.dev  ## build dist/*.whl and try it in an environment with torch alone
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --wheel . > /dev/null
	$(BIN)/python tools/smoke_wheel.py dist/*.whl

reproduce: $(VENV)/.study  ## run the study and write its report (ARGS="--preset smoke")
	$(BIN)/foof reproduce $(ARGS)

clean:  ## remove the environment and caches
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

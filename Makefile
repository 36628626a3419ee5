# make demo: the main job on real images.  make test: lint, types and tests.  Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format venv clean

demo: venv
	$(BIN)/fednca demo

test: lint
	$(BIN)/pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fednca needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

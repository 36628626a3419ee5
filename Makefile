# make demo: the main job on real images.  make test: lint, types and tests.  make bench: rounds beside other simulators.
# The first two set up .venv once, the last .venv-bench.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test bench lint format venv clean

demo: venv
	$(BIN)/fednca demo

test: lint
	$(BIN)/pytest --numprocesses 2 --dist loadfile

bench: .venv-bench/ready
	.venv-bench/bin/python benchmarks/rounds.py --set device=cpu

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

.venv-bench/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

clean:
	rm -rf .venv .venv-bench build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

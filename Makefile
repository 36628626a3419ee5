# `make` alone lists the targets: the comments after ## below. What a target needs is installed at its first use.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := pip install --quiet --disable-pip-version-check --constraint constraints.txt
TEST := $(BIN)/pytest --numprocesses 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format docs bench venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: venv ## train FedAvg and FedNCA-ML on handwritten digits, and write a report
	$(BIN)/fednca demo

test: lint ## lint, then run the tests that are not slow; what every change must pass
	$(TEST) -m "not slow"

test-all: lint ## lint, then run all tests, slow ones too
	$(TEST)

lint: venv ## check style, formatting, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## fix style and formatting where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv-docs/ready ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

bench: .venv-bench/ready ## time rounds beside other simulators on the CPU
	.venv-bench/bin/python benchmarks/rounds.py --set device=cpu

venv: .venv/ready ## set up .venv with everything but the benchmark's and the documentation's packages

clean: ## remove the environments and everything built
	rm -rf .venv .venv-bench .venv-docs site build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fednca needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) --editable '.[dev]'
	touch $@

.venv-bench/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/$(INSTALL) --editable '.[bench]'
	touch $@

# The reference is read from the source, so the packages of the extra are enough: neither fednca nor torch is needed.
.venv-docs/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/extra.txt
	.venv-docs/bin/$(INSTALL) --requirement .venv-docs/extra.txt
	touch $@

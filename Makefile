# Two commands do everything on a machine with Python 3.11 or newer: `make demo` and `make test`.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-fast test-servers chaos soak lint format clean

# The first of these that is new enough; `make PYTHON=...` names another.
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$each" && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*  ## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: $(INSTALLED)  ## a virtual environment in .venv with all that demo and test need

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Headrace needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv || { \
		echo "no virtual environment: on Debian and Ubuntu, apt-get install python3-venv" >&2; rm -rf .venv; exit 1; }
	@echo "installing Headrace and its tools into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## a small model answers a few requests, in one process and without any server
	@$(BIN)/headrace demo

test: setup test-servers lint  ## everything, with a real RabbitMQ and a real Redis
	$(BIN)/python -m pytest

test-fast: setup  ## only what needs no server
	$(BIN)/python -m pytest tests/unit

chaos: setup test-servers  ## every fault at every point, with real servers and processes (about half an hour)
	HEADRACE_CHAOS=1 $(BIN)/python -m pytest tests/chaos

soak: setup test-servers  ## a load under random blows: make soak REQUESTS=100000 MINUTES=10
	$(BIN)/python -m ops.soak --requests $(or $(REQUESTS),100000) --minutes $(or $(MINUTES),10)

test-servers:
	@tests/servers/install.sh

lint: setup  ## style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## let ruff put the code in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## back to a fresh checkout, .venv included
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# SPDX-License-Identifier: Apache-2.0
# Each target sets up .venv by itself when it has to; `make help` lists them.
PYTHON ?= python3
VENV := .venv/bin/python

.PHONY: help setup demo test lossless check format
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST)

setup:  ## build .venv, or say that it is up to date
	@$(PYTHON) tools/setup_env.py

demo: setup  ## transcribe the bundled audio offline, then through a local server
	@$(VENV) examples/speechlm2/demo.py

test: check  ## lint, format, types and tests
	@echo "== pytest"
	@$(VENV) -m pytest
	@echo "make test: lint, format, types and tests passed"

lossless: setup  ## compare thousands of results with and without a draft (about half an hour)
	@$(VENV) -m pytest tests/collections/speechlm2/vllm/test_lossless.py -m "grid or not grid"

check: setup  ## lint, format and types only
	@echo "== ruff check" && $(VENV) -m ruff check
	@echo "== ruff format" && $(VENV) -m ruff format --check
	@echo "== mypy" && $(VENV) -m mypy

format: setup  ## rewrite the sources in the project's format
	@$(VENV) -m ruff check --fix
	@$(VENV) -m ruff format

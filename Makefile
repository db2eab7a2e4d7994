# The two commands a newcomer needs: `make run` (set up, then the demo) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup run test lint bench clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with everything that run and test need

# The stamp is written last, so that an interrupted set-up starts over.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "splitroute needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)"; \
	  echo "name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; } >&2
	@echo "Setting up $(VENV): torch and what reads models are downloaded, which takes a minute or two."
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[local,dev]'
	@touch $(READY)

run: setup ## Run the demo: three real requests through the gateway, and where each went
	$(BIN)/splitroute demo

test: setup lint ## Lint, then run the whole test suite; skips are printed with their reasons
	$(BIN)/python -m pytest -ra

lint: setup ## Style, types and the layering rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## Split against unified on this machine, quickly
	$(BIN)/python -m benchmarks.disagg --quick --only head

clean: ## Remove .venv and every build and cache folder
	rm -rf $(VENV) build dist results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

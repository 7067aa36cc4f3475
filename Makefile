# Two commands on a fresh machine with Python 3.11 and pip: make demo, make test.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
IN_TWO := -n 2 --dist worksteal

unexport PYTHONDONTWRITEBYTECODE  # what one interpreter compiles, the hundreds that tests start load

.PHONY: demo test test-long gpu check docs format clean

# The exact versions that were tested; torch's CPU build where the index offers one.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "leandit needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/leandit demo

test: $(READY)
	$(BIN)/python -m pytest $(IN_TWO) --durations 10

# The long forms: all crash points and bit flips, hundreds of kills, many examples. About an hour on two cores.
test-long: $(READY)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest $(IN_TWO) -m "slow or integration or hypothesis" --timeout 3600

# The tests that need a GPU, then every figure; where a test fails, make does too, after the figures. The same command goes
# on where it was cut.
MINUTES ?= 40
gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu --numprocesses 8 --tb short --durations 5; tests=$$?; \
	$(BIN)/python benchmarks/gpu.py run --minutes $(MINUTES) --out leandit-gpu && $(BIN)/python benchmarks/gpu.py table leandit-gpu && exit $$tests

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(MAKE) docs

# The documentation with search and a reference of the public names, in build/site. A warning is an error (with --quiet
# mkdocs would count none).
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info leandit-demo .pytest_cache .ruff_cache .hypothesis

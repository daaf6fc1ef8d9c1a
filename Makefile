# One command for a newcomer: `make demo`. Everything is installed into .venv, nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
export OMP_NUM_THREADS = 1
# each of the many processes that tests start would compile the library anew
export PYTHONDONTWRITEBYTECODE =
export HF_HUB_OFFLINE = 1

.PHONY: demo test check lint types contracts slow browser docs bench mutants damaged gpu clean

demo: $(VENV)/.installed  ## corpus, training, measuring, report, dashboard on 127.0.0.1:8501
	$(BIN)/workbench demo $(ARGS)

test: $(VENV)/.installed-dev  ## the fast tests, under three minutes on two idle cores, four on slow ones
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(ARGS)

check: lint types contracts test slow  ## everything CI checks

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

slow: $(VENV)/.installed-dev  ## browser, demo and other minutes-long tests
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

docs: $(VENV)/.installed-dev  ## regenerate the tables and pictures under docs/, and what the notebooks show
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/notebooks.py

bench: $(VENV)/.installed-dev  ## what instrumentation and statistics cost, against plain twins
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/instrumentation.py
	$(BIN)/python benchmarks/attention_statistics.py
	$(BIN)/python benchmarks/token_similarity.py
	$(BIN)/python benchmarks/closed_forms.py
	$(BIN)/python benchmarks/cross_entropy.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/observing.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/dashboard.py

mutants: $(VENV)/.installed-dev  ## what share of small faults the fast tests catch
	$(BIN)/python benchmarks/mutation.py $(ARGS)

damaged: $(VENV)/.installed-dev  ## thousands of damaged files of every kind: all are read or refused by name
	$(BIN)/python benchmarks/damaged_files.py $(ARGS)

gpu: $(VENV)/.installed-dev  ## what waits for a GPU: its tests, kernels, training steps, the `mini` study; the same command goes on
	$(BIN)/python benchmarks/gpu.py $(ARGS)

browser:  ## install a browser for the browser tests and PNG export (Debian, Ubuntu)
	apt-get update && apt-get install -y --no-install-recommends chromium

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "workbench needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache *.egg-info

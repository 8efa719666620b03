# make run    set up, fetch SmolLM2-135M-Instruct and answer PROMPT     make test   set up, then make check
# make demo   set up, a small hybrid model of ours with its draft: several tokens a step, and whether that pays here
# make check  format, lint, types, tests (set up already)               make bench  measure this machine
# make check-gpu   the GPU's tests, on an NVIDIA GPU and with the extra `cuda` installed in PYTHON's environment
PYTHON ?= python3
override VENV := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
RUNS   := $(VENV)/runs
MODEL  ?= smollm2
PROCESSES ?= 2
PROMPT ?= Why is the sky blue? Answer in three sentences.

.DEFAULT_GOAL := help
.PHONY: help run demo chat bench test check check-gpu check-gpu-tests check-gpu-memory check-gpu-races format lint types tests options-doc setup clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The question travels in the environment, so that quotes and dollar signs in it are safe.
run: export QUESTION := $(value PROMPT)
run: $(RUNS)
	@$(BIN)/sparkinfer run -m "$(MODEL)" -p "$$QUESTION"

# A model with recurrent layers and routed experts, and its draft, both in the repository: nothing is fetched.
DEMO        := examples/hybrid-demo
DEMO_PROMPT ?= Write a Python function that returns the n-th Fibonacci number without recursion.
demo: export QUESTION := $(value DEMO_PROMPT)
demo: $(RUNS)
	@$(BIN)/sparkinfer run -m $(DEMO)/target.gguf -md $(DEMO)/draft.gguf -p "$$QUESTION" -n 128 --spec on --stats --compare

chat: $(RUNS)
	@$(BIN)/sparkinfer chat -m "$(MODEL)"

bench: $(RUNS)
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
	$(BIN)/pytest -q -n $(PROCESSES) --dist worksteal

# On the GPU: whole models, the bits of speculation and kernels, small and at real shapes; then its checkers of memory
# and of races on the first cases of each kernel. Side by side where pytest-xdist is installed.
GPU_PATH  = PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}"
GPU_TESTS = tests/models/test_cuda_*.py tests/dflash/test_lossless_matrix.py tests/dflash/test_lossless_requests.py \
            tests/dflash/test_cuts_lossless.py tests/dflash/test_known_faults.py tests/kernels/test_triton_*.py
CHECKED   = attention delta_net embed experts greedy_chain linear norms recurrent rope
SANITIZER = $(GPU_PATH) compute-sanitizer --target-processes application-only --error-exitcode 9 \
            --launch-timeout 120 --max-connections 64
SANITIZED = $(PYTHON) -m pytest -q -p no:cacheprovider --timeout 300

check-gpu: check-gpu-tests check-gpu-memory check-gpu-races

check-gpu-tests: export GOLDEN_DEVICE := cuda
check-gpu-tests:
	$(GPU_PATH) $(PYTHON) -m pytest -q --timeout 300 \
	  $$($(PYTHON) -c 'import xdist' 2>/dev/null && echo ' -n 16 --dist loadgroup') $(GPU_TESTS)

check-gpu-memory: SIDE_BY_SIDE = model-memory $(CHECKED:%=memory-%)
check-gpu-races: SIDE_BY_SIDE = $(CHECKED:%=races-%)
check-gpu-memory check-gpu-races:
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: $@ was not run"; exit 69; }
	@$(MAKE) --no-print-directory --jobs=8 --keep-going --output-sync=target $(SIDE_BY_SIDE)

# Every tensor is an allocation of its own there, so that a step outside is seen; graphs cannot be captured then.
memory-%: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
memory-%:
	$(SANITIZER) --tool memcheck $(SANITIZED) --cases 2 tests/kernels/test_triton_$*.py

model-memory:
	$(SANITIZER) --tool memcheck $(SANITIZED) tests/models/test_cuda_target.py -k "commit and moe and tiny256"

races-%:
	$(SANITIZER) --tool racecheck $(SANITIZED) --cases 1 tests/kernels/test_triton_$*.py

options-doc: $(READY)
	$(BIN)/sparkinfer options --markdown > docs/options.md.new
	mv docs/options.md.new docs/options.md

setup: $(READY)

# What runs models, and what the checks need beside it. A stamp is written last: an interrupted set-up has none, and
# starts over from an empty environment.
$(RUNS): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; make PYTHON=... names another"; exit 69; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed"; exit 69; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "error: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 69; }
	@test -e $@ || rm -rf $(VENV)
	@rm -f $@
	@echo "setting up $(VENV): 0.4 GB, once ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(READY): $(RUNS)
	@echo "what the checks need: 2.1 GB more in $(VENV), once ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

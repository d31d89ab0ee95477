# `make demo` and `make test` do all the set-up by themselves; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Extra words for pip, e.g. `make test PIP_ARGS=--no-cache-dir`.
PIP_ARGS ?=
DEMO_ARGS ?=
# A worker of pytest-xdist that is lost ends the run: replacing it can leave the run waiting for ever.
# Files run in their order, the longest of them (faults of collectors) first: the last one runs alone.
PYTEST_ARGS ?= -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
BENCH_ARGS ?=

.DEFAULT_GOAL := help
# Both stamps install into one environment, so they may not run at the same time.
.NOTPARALLEL:
.PHONY: help demo test parts check bench bench-processes bench-cliffs bench-costs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo.stamp ## Train PPO on CartPole-v1 and draw its learning curve
	$(PY) examples/ppo_cartpole.py --plot learning_curve.png $(DEMO_ARGS)

# Tests start thousands of processes: without compiled files each of them would compile all of swath again.
test: $(VENV)/.dev.stamp parts ## Run the tests (PYTEST_ARGS="-k loop" to choose)
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(PYTEST_ARGS)

parts: # What the tests of clusters need beyond Python: Slurm, and tools for networks
	@.ci/parts

check: $(VENV)/.dev.stamp ## Lint, formatting, types, layer rule, spelling, rules of the house
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(BIN)/lint-imports --no-cache
	$(PY) -m codespell_lib .
	$(PY) .ci/house.py

bench: $(VENV)/.dev.stamp ## Compare with other ways of collecting (BENCH_ARGS="--help" for options)
	$(PY) benchmarks/run.py $(BENCH_ARGS)

bench-processes: $(VENV)/.dev.stamp ## The same with several processes (about an hour; BENCH_ARGS="--rounds 2" for less)
	$(PY) benchmarks/run.py --suite processes $(BENCH_ARGS)

bench-cliffs: $(VENV)/.dev.stamp ## Beside the loop that a careful user writes, for some twenty settings
	$(PY) benchmarks/run.py --suite cliffs $(BENCH_ARGS)

bench-costs: $(VENV)/.dev.stamp ## What a batch and a step cost, for docs/speed.md
	$(PY) -m benchmarks.cliffs.costs

clean: ## Remove the environment, caches and what the demo wrote
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f learning_curve.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "swath needs Python 3.10 or newer, and '$(PYTHON)' is not. Name another: make PYTHON=python3.12 ..."; \
		exit 1; }
	@echo "==> Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is in the package python3-venv."; \
		exit 1; }

# .demo.stamp and .dev.stamp: the package, editable, with the extra of that name.
$(VENV)/.%.stamp: pyproject.toml constraints.txt | $(PY)
	@echo "==> Installing swath[$*] into $(VENV). The first time this downloads torch and takes some minutes."
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[$*]"
	@touch $@
	@echo "==> Installed swath[$*]"

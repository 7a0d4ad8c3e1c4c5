# Atoll's commands. `make up` and `make test` are all that a fresh machine needs: Debian 12, root, Python 3.11, package registries.

PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
SEED ?= 1
SEEDS ?= 0
export PYTHONDONTWRITEBYTECODE = 1

.DEFAULT_GOAL := help
.PHONY: help up down test test-long check bench sim build fmt fuzz lock clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## install what is missing, build, start everything, run a first sandbox (root)
	@$(PYTHON) scripts/setup.py --for run
	@.venv/bin/atoll up

down: ## stop what `make up` started
	@if [ -x .venv/bin/atoll ]; then .venv/bin/atoll down; else echo "nothing was ever started from here"; fi

test: ## every test, matrices sampled (root; about half an hour)
	@$(PYTHON) scripts/setup.py --for test
	@$(PYTHON) scripts/suite.py test

test-long: ## every test with the full matrices (root)
	@$(PYTHON) scripts/setup.py --for test
	@$(PYTHON) scripts/suite.py long

check: ## lint, types, import contracts, unit tests (under a minute)
	@$(PYTHON) scripts/setup.py --for check
	@$(PYTHON) scripts/suite.py check

bench: ## measure, with baselines in the same run, and write docs/PERFORMANCE.md (root)
	@$(PYTHON) scripts/setup.py --for test
	@.venv/bin/python bench/run.py

sim: ## one seeded simulation, or many: make sim SEED=7, make sim SEEDS=1000
	@$(PYTHON) scripts/setup.py --for check
	@.venv/bin/python -m atoll.testing.sim --seed $(SEED) --seeds $(SEEDS)

build: ## only build atoll-guest, atoll-io and runsc into build/bin
	@$(PYTHON) scripts/setup.py --only go programs runsc

fmt: ## format Python and Go
	@.venv/bin/ruff format
	@.venv/bin/ruff check --fix --select I,UP,RUF100 --quiet
	@"$$(build/tools/go env GOROOT)/bin/gofmt" -w native

fuzz: ## run each Go fuzz target for a while: make fuzz FUZZTIME=20s
	@scripts/fuzz.sh

lock: ## rewrite requirements/*.txt from pyproject.toml (scripts/lock.sh --upgrade takes newer versions)
	@scripts/lock.sh

clean: ## remove what was built here, not the environment, the cache or a running instance's state
	rm -rf build/bin build/stamps build/log build/reports .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

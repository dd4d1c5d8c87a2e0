# make train      set up an environment and train on real data with differential privacy
# make test       set up an environment, check style, layers and types, and run the tests: about 10 minutes on two cores
# make test-all   and those with optional packages (EXTRAS), processes, pages' examples and all combinations
# make test-slow  the tests that train to accuracy or repeat many times; takes hours
# make mutants    how many mistakes planted in privacy/ and in the proofs the tests notice; MUTANTS=all, SEED=7
# make regimes    what a step costs on networks of many kinds, compared with other libraries; takes hours
# make docs       build the documentation into build/site; a warning is an error
# make clean      remove what the targets above made, run folders excepted
#
# PYTHON=python3.12 selects the interpreter, VENV=folder the environment, EXTRAS=dev,hf the optional packages,
# PYTEST_ARGS="-k ledger" what pytest is told.

# The first interpreter on the path that is new enough; `make PYTHON=...` overrides it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
VENV ?= .venv
EXTRAS ?= dev
PYTEST_ARGS ?= -n auto --dist loadgroup --durations=15
TRAIN_ARGS ?= --data digits
MUTANTS ?= 300
SEED ?= 0

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest
STAMP := $(VENV)/.installed
STAMP_EXTRAS := $(STAMP)-$(subst $(comma),-,$(EXTRAS))

.PHONY: help train install test test-all test-slow mutants regimes lint docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

train: $(STAMP)
	$(BIN)/equipoise train $(TRAIN_ARGS)
	@echo "Before these, once in each shell: . $(BIN)/activate"

install: $(STAMP_EXTRAS)

test: lint
	$(PYTEST) tests src/equipoise $(PYTEST_ARGS)

test-all: lint
	$(PYTEST) tests src/equipoise reproduction contrib baselines -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP_EXTRAS)
	$(PYTEST) tests -m slow $(PYTEST_ARGS)

mutants:
	$(MAKE) install EXTRAS=dev,mutants
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py $(MUTANTS) --seed $(SEED) --least 0.85

regimes:
	$(MAKE) install EXTRAS=dev,hf,peers
	$(BIN)/python benchmarks/step_time.py --processor --threads 1 --rounds 5 --seconds 0.15 --gigabytes 6 --tasks \
		mlp-16 mlp mlp-1024 mlp10m-16 mlp10m-256 cnn-16 cnn cnn-1024 resnet20-16 resnet20 attention \
		lstm gru lstm-tagger gru-tagger lm-64 gpt2 gpt2lin
	$(BIN)/python benchmarks/step_time.py --processor --threads 1 --rounds 3 --seconds 0.1 --steps 1 --gigabytes 7 \
		--together 1 --default-allocator --tasks lm-256 lm-1024 lm-50k-words lm-50k-words-tied resnet18 lora \
		lora-16x64 gpt2-small gpt2-small-16x64
	$(BIN)/python benchmarks/live_bytes.py --tasks mlp cnn attention lstm lm-64 gpt2 gpt2-checkpointed

docs: $(STAMP)
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(STAMP_EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry src/equipoise
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "equipoise needs Python 3.11 or newer and found none on the path." \
		"Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11," \
		"which equipoise needs. Name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; echo "$(PYTHON) cannot make virtual environments." \
		"On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# torch goes first and pinned: a later requirement then finds it in place and cannot pull another build.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing PyTorch and the rest into $(VENV): about 1.5 GB, some minutes."
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@echo "PyTorch is there; now the rest, a minute or two."
	$(PIP) install -q -c constraints.txt -e '.[cli]'
	@touch $@

$(STAMP_EXTRAS): $(STAMP)
	$(PIP) install -q -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

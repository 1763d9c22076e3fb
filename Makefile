# Every check that CI runs is a target here, so that a hook, a developer and CI run the same command.
# `make help` lists the targets. Needs Python >= 3.10 with venv, Rust >= 1.89 and a C compiler; the rest goes into .venv.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
CARGO_TEST_ARGS ?=
BENCH_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV_DIR := $(abspath $(VENV))
VPY := $(VENV_DIR)/bin/python
# PYO3_PYTHON: the interpreter whose stable ABI pyo3 reads its configuration from.
IN_VENV := VIRTUAL_ENV=$(VENV_DIR) PATH=$(VENV_DIR)/bin:$$PATH PYO3_PYTHON=$(VPY) PIP_CONSTRAINT=$(CURDIR)/constraints.txt
CARGO := cargo
LOCKED := --locked

DEPS_STAMP := $(VENV_DIR)/.daf-deps
BUILD_STAMP := $(VENV_DIR)/.daf-build
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find src -name '*.rs')

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-14s %s\n", $$1, $$2 }'

# --- set-up ---------------------------------------------------------------------------------------------------------

$(DEPS_STAMP): pyproject.toml constraints.txt
	@command -v $(CARGO) >/dev/null || { echo "error: cargo not found: install Rust >= 1.89" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "error: no C compiler (cc) found: Rust needs one to link; on Debian: apt-get install gcc libc6-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else f"error: Python >= 3.10 is needed, {sys.executable} is {sys.version.split()[0]}; name another one with PYTHON=")'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "error: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	test -x $(VPY) || $(PYTHON) -m venv $(VENV_DIR)
	$(VPY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(VPY) -m pip install --quiet --progress-bar off --constraint constraints.txt --group dev
	@touch $@

# The editable installation points to python/daf_rs, so only Rust sources (or a module that is gone) ask for a new build.
NATIVE_MODULE := python/daf_rs/_native.abi3.so
$(BUILD_STAMP): $(DEPS_STAMP) $(NATIVE_SOURCES) $(if $(wildcard $(NATIVE_MODULE)),,FORCE)
	$(IN_VENV) $(VPY) -m maturin develop --release --locked --extras demo
	@touch $@

.PHONY: FORCE
FORCE:

.PHONY: dev
dev: $(BUILD_STAMP) ## Create .venv, install what development needs, build the native module

.PHONY: demo
demo: $(BUILD_STAMP) ## Train a small network plainly and compressed, and print what it cost
	$(VPY) -m daf_rs demo

# --- checks ---------------------------------------------------------------------------------------------------------

.PHONY: lint
lint: lint-rust lint-py lint-stubs ## All static checks, Rust and Python

.PHONY: lint-rust
lint-rust: $(DEPS_STAMP) ## rustfmt, clippy with and without the bindings, the core without Python
	$(CARGO) fmt --check
	$(CARGO) check $(LOCKED) --no-default-features --lib
	$(CARGO) clippy $(LOCKED) --all-targets -- -D warnings
	$(IN_VENV) $(CARGO) clippy $(LOCKED) --all-targets --features python -- -D warnings

.PHONY: lint-py
lint-py: $(DEPS_STAMP) ## ruff, mypy, the layout rules
	$(VPY) -m ruff check .
	$(VPY) -m ruff format --check .
	$(VPY) -m mypy
	$(VPY) -m pytest -q --durations=0 tests/test_layout.py

.PHONY: lint-stubs
lint-stubs: $(BUILD_STAMP) ## The type stubs against the built module
	MYPYPATH=python $(VPY) -m mypy.stubtest daf_rs._native

.PHONY: format
format: $(DEPS_STAMP) ## Format Rust and Python, apply ruff's fixes
	$(CARGO) fmt
	$(VPY) -m ruff check --fix .
	$(VPY) -m ruff format .

.PHONY: test
test: test-rust test-py ## All tests, Rust and Python (CARGO_TEST_ARGS=, PYTEST_ARGS=)

.PHONY: test-rust
test-rust: ## The Rust tests; need no Python
	$(CARGO) test $(LOCKED) --no-default-features $(CARGO_TEST_ARGS)

.PHONY: test-py
test-py: $(BUILD_STAMP) ## The Python tests and every example in docstrings and documents
	$(VPY) -m pytest $(PYTEST_ARGS)

.PHONY: test-neon
test-neon: ## The Rust tests for aarch64 under qemu, on two CPU models
	bash scripts/test_neon.sh

.PHONY: test-baseline
test-baseline: ## The Rust tests on an emulated x86-64 without AVX and FMA
	bash scripts/test_baseline.sh

.PHONY: test-valgrind
test-valgrind: ## A subset of the Rust tests under valgrind
	bash scripts/test_valgrind.sh

.PHONY: test-oldest
test-oldest: ## The Python tests with the oldest supported torch, in .venv-oldest
	bash scripts/test_oldest.sh

# --- benchmarks -----------------------------------------------------------------------------------------------------

.PHONY: bench
bench: ## Benchmarks of every kernel (BENCH_ARGS= is passed to criterion)
	$(CARGO) bench $(LOCKED) $(BENCH_ARGS)

.PHONY: bench-smoke
bench-smoke: $(BUILD_STAMP) ## Run every benchmark once, without measuring (hence without link-time optimisation)
	CARGO_PROFILE_BENCH_LTO=off CARGO_PROFILE_BENCH_CODEGEN_UNITS=16 $(CARGO) bench $(LOCKED) -- --test

# --- distribution ---------------------------------------------------------------------------------------------------

.PHONY: wheel
wheel: $(DEPS_STAMP) ## Build the manylinux_2_28 wheel and the sdist into dist/
	rm -rf dist
	$(IN_VENV) $(VPY) -m maturin build --release --locked --strip --zig --target x86_64-unknown-linux-gnu --compatibility manylinux_2_28 --out dist
	$(IN_VENV) $(VPY) -m maturin sdist --out dist

.PHONY: check-wheel
check-wheel: wheel ## Build and check the wheel and the sdist: policy, symbols, a clean installation, a training step
	$(VPY) scripts/check_wheel.py dist

.PHONY: docs
docs: $(BUILD_STAMP) ## API documentation of both languages into target/doc
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(LOCKED) --no-deps
	$(VPY) -m pdoc --docformat google --output-directory target/doc/python daf_rs
	@echo "target/doc/daf_rs/index.html target/doc/python/index.html"

.PHONY: ci
ci: ## What CI runs, from nothing
	bash .ci/run

.PHONY: clean
clean: ## Remove everything that was built, .venv included
	$(CARGO) clean
	rm -rf .venv .venv-oldest dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests -name __pycache__ -prune -exec rm -rf {} +
	rm -f python/daf_rs/*.so

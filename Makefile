# make serve    everything from a clone to a served model: environment, model, server
# make check    the tests to run while you work: under two minutes on two cores
# make test     every test, on four processes
# make nightly  every test, with the property tests at their largest
# make lint     ruff and mypy
# make docs     the documentation's site, into site/; a broken link fails
# make wheel    an installable package with its machine code, into dist/
# make setup    a developer's environment alone

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# What serving needs, and what a developer needs beside it.
SERVES := $(VENV)/.serves
STAMP := $(VENV)/.installed

# Which torch: the build that the index TORCH_INDEX=URL has; without one, the CPU's build, which uv
# knows where to find, unless NVIDIA's driver is here. What cannot be had so comes from pip's usual
# index, whose build for Linux is CUDA's and takes several GB.
TORCH_INDEX ?=

# More options for `tailor serve`: make serve ARGS="--port 9000"; for pytest: make test ARGS="-k lossless"
ARGS ?=
# Processes of a test run: two a core, as many tests wait. A file's tests stay in one process;
# tests/conftest.py orders the files.
JOBS ?= 4
# Bytecode is kept, whatever the shell says: tests start hundreds of Python processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
CHECKED := tests/test_layering.py tests/test_lint.py tests/drafters tests/vocab_store tests/engine tests/api

.PHONY: serve check test nightly setup lint docs wheel help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tailor needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)

# Nothing is installed again while these files stay as they are. torch comes first: what is
# installed after it takes the build that is there. The largest packages get their bytecode when
# they are imported, and no more of it than that: whole, it is 180 MB. Machine code is made once a
# machine: other clones find it in the user's cache folder.
$(SERVES): pyproject.toml constraints.txt setup.py | $(BIN)/python
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@echo "  torch"
	@if test -n "$(TORCH_INDEX)"; then $(PIP) --index-url "$(TORCH_INDEX)" torch==2.13.0; \
	elif command -v nvidia-smi >/dev/null; then false; \
	else echo "    the CPU's build, of PyTorch's index" && $(PIP) uv && UV_HTTP_CONNECT_TIMEOUT=3 \
	  UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu \
	  -c constraints.txt torch==2.13.0 2>/dev/null; \
	fi || { echo "    the build of pip's usual index (TORCH_INDEX=URL names another index)"; \
	  $(PIP) --no-compile torch==2.13.0; }
	@$(BIN)/python -m pip uninstall --quiet --yes uv 2>/dev/null
	@echo "  everything else"
	@$(PIP) --no-compile transformers numba
	@$(PIP) -e '.[compile]'
	@command -v cc >/dev/null || $(PIP) ziglang
	@$(BIN)/python -m server.machine_code
	@touch $@

$(STAMP): $(SERVES) constraints-triton.txt
	@echo "  a developer's tools"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) -r constraints-triton.txt
	@$(PIP) -e '.[dev,docs]'
	@touch $@

serve: $(SERVES)
	@exec $(BIN)/tailor serve --hello $(ARGS)

check: $(STAMP)
	$(PYTEST) --hypothesis-profile check -m "not slow and not attack" $(CHECKED) $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

nightly: $(STAMP)
	$(PYTEST) --hypothesis-profile nightly $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy server drafters vocab_store loadtest tests

docs: $(STAMP)
	$(BIN)/python -c 'from server.commands.cli import build_app; print(build_app().generate_docs())' >docs/command-line.md
	$(BIN)/zensical build --clean --strict

wheel: | $(BIN)/python
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

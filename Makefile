# make serve   everything from a clone to a served model: environment, model, server
# make test    all set-up and the whole test suite
# make setup   the set-up alone
# make lint    ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
STAMP := $(VENV)/.installed

# More options for `tailor serve`: make serve ARGS="--port 9000"
ARGS ?=

.PHONY: serve test setup lint help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

# Nothing is installed again while these two files stay as they are. torch comes first: what is
# installed after it takes the build that is there.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tailor needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  torch"
	@$(PIP) torch==2.13.0
	@echo "  everything else"
	@$(PIP) -e '.[dev]'
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/tailor serve --hello $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy server drafters vocab_store

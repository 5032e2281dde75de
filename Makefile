# Everything starts with `make setup`; `make help` lists the rest.
# Another Python for the virtual environment: make setup PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# MiB that PySpark, Kafka and what pip keeps take on the disk.
ROOM_MIB := 2000

# One sentence that says what to do, instead of a stack trace.
DIE := die() { echo "setup: $$1" >&2; exit 1; };

# Processes that share the tests: as many as cores, since each runs a broker and Spark.
WORKERS ?= 2

# Ten failures have one cause, which is told at once. A process that died is not started again, since it would get the
# test that it died of.
IN_PARALLEL = -n $(WORKERS) --no-loadscope-reorder --maxfail=10 --max-worker-restart=0

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-all hostile check lint types prose dead duplicates fast docs bench clean
MAKEFLAGS += --no-print-directory

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## virtual environment, packages and jars; a second when nothing changed
	@$(BIN)/python -m duetime.local.jars
	@$(BIN)/python -m duetime.pipeline.class_archive

demo: setup ## a local Kafka, 1,000 delayed messages, and how punctual they were
	@$(BIN)/duetime demo

up: setup ## a local Kafka and the pipeline, until Ctrl-C
	@$(BIN)/duetime up

test: setup ## the tests, on a real Kafka and Spark, without the slow ones
	@$(BIN)/pytest -m "not slow and not hostile" $(IN_PARALLEL)

test-all: setup ## the slow ones too: what CI runs
	@$(BIN)/pytest -m "not hostile" $(IN_PARALLEL) --durations=60 --durations-min=4

hostile: setup ## kills, pauses, full disks, lost brokers, clocks that are set: run it before a release
	@$(BIN)/pytest -m hostile

check: lint types prose dead duplicates fast ## what needs no broker: lint, types, prose, dead code, fast tests

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-logo >$(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }

types: setup
	@$(BIN)/mypy

prose: setup
	@$(BIN)/python tools/prose.py

dead: setup
	@$(BIN)/vulture

duplicates: setup
	@$(BIN)/pylint --disable=all --enable=duplicate-code --score=n --min-similarity-lines=8 \
	    --ignore-imports=y --ignore-docstrings=y --ignore-signatures=y src/duetime

fast: setup
	@$(BIN)/pytest tests/unit -m "not system" -n $(WORKERS)

docs: setup ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "the site is in site/: $(BIN)/mkdocs serve shows it"

bench: setup ## the measured figures of the README, one JSON line each
	@$(BIN)/duetime bench lateness --rate 10000 --seconds 60 --delay 5s..30s --json
	@$(BIN)/duetime bench lateness --rate 1000 --seconds 60 --delay 5s..30s --json
	@$(BIN)/duetime bench lateness --rate 2000 --seconds 60 --delay 0.05s..2s --json
	@for mode in leaderless refusing missing; do \
	    $(BIN)/duetime bench lateness --stuck $$mode --rate 1000 --seconds 60 --delay 0s..10s --json || exit; done
	@$(BIN)/duetime bench catchup --messages 1000000 --json
	@$(BIN)/duetime bench intake --messages 1000000 --json
	@$(BIN)/duetime bench pending --messages 5000000 --json
	@$(BIN)/duetime bench lookup --messages 10000000 --times 100 --json
	@$(BIN)/duetime bench wheel --years 5 --json
	@$(BIN)/duetime bench delayed --rate 2000 --seconds 60 --delay 0.1s..60s --json
	@$(BIN)/duetime bench queue --messages 200000 --drop 0.01 --timeout 5s --json
	@$(BIN)/duetime bench api --json
	@$(BIN)/duetime bench bulk --rows 10000000 --json
	@$(BIN)/duetime bench crash --kills 20 --rate 2000 --json

clean: ## remove what setup and the tools made here (the jars stay in the user's cache)
	@rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A changed pyproject.toml is installed into the environment that is there already.
$(INSTALLED): pyproject.toml
	@$(DIE) java=$${JAVA_HOME:+$$JAVA_HOME/bin/}java; command -v "$$java" >/dev/null || \
	    die "Java is missing: install Java 17 or newer, or set JAVA_HOME to where it is"
	@$(DIE) python=$(BIN)/python; [ -x $$python ] || python="$(PYTHON)"; \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    die "$$python is missing or older than 3.11: install Python 3.11 or newer, or name it with PYTHON=..."
	@$(DIE) [ "$$(df -Pm . | awk 'NR == 2 { print $$4 }')" -ge $(ROOM_MIB) ] || \
	    die "less than $(ROOM_MIB) MiB are free on this disk: make room for PySpark and Kafka"
	@$(DIE) [ -x $(BIN)/pip ] || "$(PYTHON)" -m venv --clear $(VENV) >/dev/null 2>&1 || { \
	    rm -rf $(VENV); die "$(PYTHON) has no venv module: install it (Debian: apt install python3-venv)"; }
	@echo "installing packages into $(VENV) (minutes, the first time) ..."
	@$(DIE) $(BIN)/pip install --quiet -e '.[dev]' 2>$(VENV)/install.log || \
	    die "packages could not be installed (pip's words: $(VENV)/install.log): check the network and try again"
	@touch $@

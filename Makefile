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

# Of tests in several processes: so many failures have one cause, which is told at once, and a process that died may
# not be started again, since it would get the test that it died of.
GIVE_UP := --maxfail=10 --max-worker-restart=0

.DEFAULT_GOAL := help
.PHONY: help setup demo up test again hostile check lint types fast docs bench clean
MAKEFLAGS += --no-print-directory

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## virtual environment, packages and jars; a second when nothing changed
	@$(BIN)/python -m duetime.local.jars
	@$(BIN)/python -m duetime.pipeline.training

demo: setup ## a local Kafka, 1,000 delayed messages, and how punctual they were
	@$(BIN)/duetime demo

up: setup ## a local Kafka and the pipeline, until Ctrl-C
	@$(BIN)/duetime up

test: setup ## every test but the hostile ones
	@$(BIN)/pytest -m "not hostile" -n 3 --no-loadscope-reorder $(GIVE_UP) --durations=60 --durations-min=4

again: setup ## the tests that failed in the last run
	@$(BIN)/pytest -m "not hostile" --last-failed --last-failed-no-failures=none

hostile: setup ## kills, pauses, full disks, lost brokers, clocks that are set: run it before a release
	@$(BIN)/pytest -m hostile

check: lint types fast ## what needs no broker: lint, types, fast tests

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: setup
	@$(BIN)/mypy

fast: setup
	@$(BIN)/pytest -m "not system"

docs: setup ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "the site is in site/: $(BIN)/mkdocs serve shows it"

bench: setup ## the measured figures of the README, one JSON line each
	@$(BIN)/duetime bench lateness --rate 10000 --seconds 60 --delay 5s..30s --json
	@$(BIN)/duetime bench lateness --rate 1000 --seconds 60 --delay 5s..30s --json
	@$(BIN)/duetime bench lateness --rate 2000 --seconds 60 --delay 0.05s..2s --json
	@$(BIN)/duetime bench catchup --messages 1000000 --json
	@$(BIN)/duetime bench intake --messages 1000000 --json
	@$(BIN)/duetime bench pending --messages 5000000 --json
	@$(BIN)/duetime bench lookup --messages 10000000 --times 100 --json
	@$(BIN)/duetime bench wheel --years 5 --json
	@$(BIN)/duetime bench delayed --rate 2000 --seconds 60 --delay 0.1s..60s --json
	@$(BIN)/duetime bench queue --messages 200000 --drop 0.01 --timeout 5s --json
	@$(BIN)/duetime bench api --json
	@$(BIN)/duetime bench bulk --rows 10000000 --json

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

# make demo   the drill: kill, destroy, rewind a stream, and compare with an uninterrupted run
# make dev    the Dagster page at http://localhost:3000
# make test   formatting, types, import contracts, spelling, Markdown, and every test
# make test-fast  the tests that start no JVM, no `dagster dev` and no browser: a few minutes
# make fuzz   minutes of crafted bytes for every reader of snapshots, Spark logs and catalogs; keeps what it finds: make fuzz MINUTES=10
# make torture  every call of every operation killed, failed, its answer, the power or the lease lost; writes docs/reliability.md (20 minutes)
# make soak   half an hour of random kills, compared row for row: make soak MINUTES=8 SEED=7
# make bench  every figure of docs/performance.md, beside its peers; one section: make bench ONLY=local
# make mutants  how much the tests of Flink's rules would miss; writes docs/mutation-testing.md
# Each sets itself up in .venv first. Needs Python 3.11+ and Java 17+.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 3000
PACE ?= 2
# Length of the soak, and the seed of its kills: drawn and printed when empty.
MINUTES ?= 30
SEED ?=
# Sections of the bench, all of them when empty.
ONLY ?=
# Files of tests that run beside each other.
BESIDE ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo dev test fuzz torture test-fast soak bench mutants check format java browser clean

help:
	@sed -n '1,10s/^# //p' Makefile

demo: java $(VENV)/.demo
	$(BIN)/python -m examples.flights.drill

dev: java $(VENV)/.demo
	$(BIN)/python -m examples.flights.dev --port $(PORT) --pace $(PACE)

test: java browser $(VENV)/.dev check
	$(BIN)/pytest --numprocesses $(BESIDE) --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)/.dev
	$(BIN)/pytest --numprocesses $(BESIDE) --dist loadfile --no-loadscope-reorder \
	  -m 'not spark and not kafka and not dagster_dev and not browser and not soak'

fuzz: $(VENV)/.dev
	FUZZ_MINUTES=$(if $(filter-out file,$(origin MINUTES)),$(MINUTES),5) FUZZ_SEED=$(SEED) $(BIN)/pytest -m fuzz -s tests/fuzz

torture: $(VENV)/.dev
	$(BIN)/python -m tests.torture

soak: java $(VENV)/.dev
	SOAK_MINUTES=$(MINUTES) SOAK_SEED=$(SEED) $(BIN)/pytest -m soak -s tests/soak

bench: java $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ONLY)

mutants: $(VENV)/.mutation
	$(BIN)/mutmut run
	$(BIN)/python docs/mutation_page.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs deploy dagster_ckpt examples tests benchmarks
	$(BIN)/pymarkdown scan README.md CONTRIBUTING.md CHANGELOG.md docs deploy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .demo mutants .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install one, and name it: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@echo "Installing dagster_ckpt with Spark, Dagster and the flights of 2013 into $(VENV) (a few minutes, once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	@echo "Installing dagster_ckpt with everything its tests need into $(VENV) (a few minutes, once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.mutation: $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mutation]'
	@touch $@

# Spark runs on Java; without it Spark itself only says that its gateway exited.
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ -z "$$version" ] || [ "$$version" -lt 17 ]; then \
	  if [ -z "$$version" ]; then echo "No Java was found: '$$java' does not run."; \
	  else echo "Java 17 or newer is needed, and '$$java' is version $$version."; fi; \
	  echo "Spark 4 runs on Java 17 or 21. Get one, then run make again:"; \
	  echo "  Debian, Ubuntu   apt-get install openjdk-17-jre-headless"; \
	  echo "  Fedora, RHEL     dnf install java-21-openjdk-headless"; \
	  echo "  macOS            brew install openjdk@21"; \
	  echo "or point JAVA_HOME at one that is already there."; exit 1; fi

# The tests click through Dagster's page. Where a package can be installed without a question, it is.
browser:
	@for name in chromium chromium-browser google-chrome; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Chromium (a minute, once) ..."; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium >/dev/null; \
	else \
	  echo "No Chromium was found, which the tests of Dagster's page drive. Get one, then run make again:"; \
	  echo "  Debian           apt-get install chromium"; \
	  echo "  Fedora           dnf install chromium"; \
	  echo "  macOS            brew install --cask google-chrome, and put google-chrome on the PATH"; exit 1; \
	fi

# make demo   the drill: kill, destroy, rewind a stream, and compare with an uninterrupted run
# make dev    the Dagster page at http://localhost:3000
# make test   formatting, types, import contracts, spelling, Markdown, a sample of each promise up to end-to-end, and its core on the oldest and newest Spark (twenty minutes)
# make test-all  the same with every backend, sink, storage and step: run it before a release (an hour)
# make test SPARK=4.0  make test on another version of Spark, in an environment of its own: 3.5 to 4.3; also make test-all SPARK=4.0
# make test-versions  the core of the tests on every other version of Spark
# make test-dagster  what of Dagster's side needs no Spark, on the oldest supported Dagster
# make test-upgrades  directories of one version of Spark continued by another, and back
# make test-kafka  the transactional Kafka sink killed at every step of its protocol, and a soak: make test-kafka MINUTES=10
# make test-cluster  a stream on a standalone Spark cluster, whose master, workers, executors and driver are killed
# make test-stack  everything that deploy/ runs, as processes, each of them killed in turn while two streams run
# make stack  the same, to look at: prints the address of Dagster's page, and ends with Ctrl-C
# make test-stores  streams in HDFS and in an emulator of Google Cloud Storage, snapshots in one of Azure
# make test-state  the state of every operator on every backend: read, compared, rewritten
# make test-tables  streams into real Delta and Iceberg tables in every way, also on other versions: make test-tables SPARK=4.0
# make test-fast  those of make test that start no JVM, no `dagster dev` and no browser: a few minutes
# make fuzz   minutes of crafted bytes for every reader of snapshots, Spark logs and catalogs; keeps what it finds: make fuzz MINUTES=10
# make torture  every call of every operation killed, failed, its answer, the power or the lease lost; writes docs/evidence/reliability.md (20 minutes; run it again to continue)
# make torture-postgres  the same with a catalog in PostgreSQL, killed and cut off at every commit (10 minutes)
# make soak   half an hour of random kills, compared row for row: make soak MINUTES=8 SEED=7
# make chaos  thirty streams, each damaged at random and given wrong code and inputs for a while: make chaos SEEDS=60, make chaos SEED=7
# make docs   the documentation site, in site/; needs no network
# make screenshots  the pictures of docs/images, taken of the example with headless Chromium
# make bench  every figure of docs/evidence/performance.md, beside its peers; one section: make bench ONLY=local
# make mutants  how much the tests of Flink's rules would miss; writes docs/evidence/mutation-testing.md
# Each sets itself up in .venv first. Needs Python 3.11+ and Java 17.

# The version of Spark for the demo and for every test: the newest that Delta and Iceberg, and most other connectors,
# have releases for (docs/compatibility.md). The core of the tests runs on the others.
MAIN_SPARK := 4.1
OTHER_SPARKS = $(filter-out $(MAIN_SPARK),$(shell $(PYTHON) -m dagster_ckpt.spark.versions))
SPARK ?= $(MAIN_SPARK)

OLDEST_DAGSTER := $(foreach part,dagster dagster-pipes dagster-shared dagster-graphql dagster-webserver,$(part)==1.12.0) \
  $(foreach part,pyspark spark docker k8s postgres,dagster-$(part)==0.28.0)

PYTHON ?= python3
VENV := $(if $(filter $(MAIN_SPARK),$(SPARK)),.venv,.venv-spark$(SPARK))
BIN := $(VENV)/bin
PORT ?= 3000
PACE ?= 2
# Length of the soak, and the seed of its kills: drawn and printed when empty.
MINUTES ?= 30
SEED ?=
# Seeds of the chaos, unless SEED names one, and kinds of blows that it leaves out: sink_log, journal.
SEEDS ?= 30
WITHOUT ?=
# Sections of the bench, all of them when empty.
ONLY ?=
# Files of tests that run beside each other: one more than two cores, as one of them often waits.
BESIDE ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo dev docs screenshots test test-all test-core test-versions test-dagster test-upgrades test-kafka test-cluster test-stack stack test-stores test-state test-tables environment fuzz torture torture-postgres test-fast soak chaos bench mutants check \
  style types contracts words format java browser clean
# What is thorough is left out unless THOROUGH says otherwise, as `make test-all` does: tests/support/thorough.py.
THOROUGH ?=
PYTEST = $(BIN)/pytest $(THOROUGH) --numprocesses $(BESIDE) --dist loadfile --no-loadscope-reorder
# Targets beside each other, the output of each in one piece where make can do that.
BOTH = $(MAKE) -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

help:
	@sed -n '/^# Each sets itself up/q; s/^# //p' Makefile

demo: java $(VENV)/.demo-$(SPARK)
	$(BIN)/python -m examples.flights.drill

dev: java $(VENV)/.demo-$(SPARK)
	$(BIN)/python -m examples.flights.dev --port $(PORT) --pace $(PACE)

test: java browser $(VENV)/.dev-$(SPARK) $(if $(filter $(MAIN_SPARK),$(SPARK)),check)
	$(PYTEST)
ifeq ($(SPARK),$(MAIN_SPARK))
	$(BOTH) test-core-$(firstword $(OTHER_SPARKS)) test-core-$(lastword $(OTHER_SPARKS))
endif

test-all:
	$(MAKE) test THOROUGH=--thorough

# The tests that show that a version of Spark works, and those of what only it has and the main version has not.
test-core: java $(VENV)/.dev-$(SPARK)
	$(PYTEST) --spark-core

# The oldest beside the newest: in one process, which starts one JVM. The newest, which also rewrites state, takes longer.
test-core-%:
	$(MAKE) test-core SPARK=$* BESIDE=$(if $(filter $*,$(lastword $(OTHER_SPARKS))),2,0)

test-versions:
	for spark in $(OTHER_SPARKS); do $(MAKE) test-core SPARK=$$spark THOROUGH=--thorough || exit 1; done

# Its parts have versions of their own: 0.28 is that of Dagster 1.12.
test-dagster:
	$(MAKE) environment VENV=.venv-dagster
	.venv-dagster/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST_DAGSTER)
	.venv-dagster/bin/pytest --numprocesses 2 -m 'not spark and not dagster_dev and not browser' tests/orchestration

# Each version in its own environment; the tests start the interpreters.
test-upgrades: java $(VENV)/.dev-$(SPARK)
	for spark in $(OTHER_SPARKS); do $(MAKE) environment SPARK=$$spark || exit 1; done
	$(BIN)/pytest --thorough -m upgrades tests/upgrades tests/spark/test_spark_golden_directories.py

test-kafka: java $(VENV)/.dev-$(SPARK)
	KAFKA_SOAK_MINUTES=$(if $(filter-out file,$(origin MINUTES)),$(MINUTES),3) $(BIN)/pytest --thorough -m 'kafka or kafka_matrix' -s tests/kafka

# Also on the newest version: only there do executors rewrite state.
test-cluster: java $(VENV)/.dev-$(SPARK)
	$(BIN)/pytest --thorough -m cluster tests/cluster
ifeq ($(SPARK),$(MAIN_SPARK))
	$(MAKE) test-cluster SPARK=$(lastword $(OTHER_SPARKS))
endif

test-stack: java $(VENV)/.dev-$(SPARK)
	$(BIN)/pytest --thorough -m stack tests/stack

stack: java $(VENV)/.dev-$(SPARK)
	$(BIN)/python -m tests.stack

test-stores: java $(VENV)/.stores
	$(BIN)/pytest --thorough -m stores tests/storage tests/object_storage

# Also on the newest version, since the main version cannot rewrite state.
test-state: export DAGSTER_CKPT_REWRITER = $(CURDIR)/.venv-spark$(lastword $(OTHER_SPARKS))/bin/python
test-state: java $(VENV)/.dev-$(SPARK)
	$(MAKE) environment SPARK=$(lastword $(OTHER_SPARKS))
	$(PYTEST) --thorough -m state
ifeq ($(SPARK),$(MAIN_SPARK))
	$(MAKE) test-state SPARK=$(lastword $(OTHER_SPARKS))
endif

test-tables: java $(VENV)/.dev-$(SPARK)
	$(PYTEST) --thorough -m 'spark or tables' tests/sinks

environment: $(VENV)/.dev-$(SPARK)

test-fast: $(VENV)/.dev-$(SPARK)
	$(PYTEST) -m 'not spark and not kafka and not dagster_dev and not browser and not soak and not chaos and not fuzz and not torture and not upgrades and not state and not tables and not cluster and not stack and not stores'

fuzz: $(VENV)/.dev-$(SPARK)
	FUZZ_MINUTES=$(if $(filter-out file,$(origin MINUTES)),$(MINUTES),5) FUZZ_SEED=$(SEED) $(BIN)/pytest --thorough -m fuzz -s tests/fuzz

torture: $(VENV)/.dev-$(SPARK)
	$(BIN)/python -m tests.torture

torture-postgres: $(VENV)/.dev-$(SPARK)
	$(BIN)/python -m tests.torture.postgres

soak: java $(VENV)/.dev-$(SPARK)
	SOAK_MINUTES=$(MINUTES) SOAK_SEED=$(SEED) $(BIN)/pytest --thorough -m soak -s tests/soak

chaos: java $(VENV)/.dev-$(SPARK)
	CHAOS_WITHOUT="$(WITHOUT)" CHAOS_SEEDS=$(SEEDS) CHAOS_SEED=$(SEED) $(BIN)/pytest --thorough -m chaos -s $(if $(SEED),-k those_of_an_uninterrupted_run) tests/chaos

bench: java $(VENV)/.dev-$(SPARK)
	$(BIN)/python -m benchmarks $(ONLY)

docs: $(VENV)/.dev-$(SPARK)
	$(BIN)/mkdocs build --strict

screenshots: java browser $(VENV)/.dev-$(SPARK)
	$(BIN)/python -m docs.screenshots

mutants: $(VENV)/.mutation
	$(BIN)/mutmut run
	$(BIN)/python docs/mutation_page.py

# mypy takes as long as all the others.
check: $(VENV)/.dev-$(SPARK)
	$(BOTH) types style contracts words

style: $(VENV)/.dev-$(SPARK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-$(SPARK)
	$(BIN)/mypy

contracts: $(VENV)/.dev-$(SPARK)
	$(BIN)/lint-imports

words: $(VENV)/.dev-$(SPARK)
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs deploy dagster_ckpt examples tests benchmarks
	$(BIN)/pymarkdown scan -r README.md CONTRIBUTING.md CHANGELOG.md docs deploy tests/README.md

format: $(VENV)/.dev-$(SPARK)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .demo mutants .torture site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .venv-spark* .venv-dagster

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install one, and name it: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.demo-$(SPARK): $(VENV)/.python pyproject.toml
	$(call install,demo,Spark $(SPARK)$(COMMA) Dagster and the flights of 2013)
	@touch $@

$(VENV)/.dev-$(SPARK): $(VENV)/.python pyproject.toml
	$(call install,dev,Spark $(SPARK) and everything its tests need)
	@touch $@

COMMA := ,
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What differs between versions of Spark is known in one place. uv needs a third of pip's time, but does not read
# pip.conf: where that names the only index that can be reached, pip installs.
define install
@echo "Installing dagster_ckpt with $(2) into $(VENV) (a minute or two, once) ..."
@requirements=$$($(BIN)/python -m dagster_ckpt.spark.versions $(SPARK)) && set -f && \
  { $(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[$(1)]' $$requirements || \
    $(PIP) -e '.[$(1)]' $$requirements; }
endef

$(VENV)/.stores: $(VENV)/.dev-$(SPARK)
	@$(PIP) -e '.[stores]'
	@touch $@

$(VENV)/.mutation: $(VENV)/.dev-$(SPARK)
	@$(PIP) -e '.[mutation]'
	@touch $@

# Spark runs on Java; without it Spark itself only says that its gateway exited.
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ -z "$$version" ] || [ "$$version" -lt 17 ]; then \
	  if [ -z "$$version" ]; then echo "No Java was found: '$$java' does not run."; \
	  else echo "Java 17 or newer is needed, and '$$java' is version $$version."; fi; \
	  echo "Every version of Spark here runs on Java 17. Get it, then run make again:"; \
	  echo "  Debian, Ubuntu   apt-get install openjdk-17-jre-headless"; \
	  echo "  Fedora, RHEL     dnf install java-17-openjdk-headless"; \
	  echo "  macOS            brew install openjdk@17"; \
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

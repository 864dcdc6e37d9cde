# Every target makes what it needs from nothing but python3 >= 3.10 and make.
#   make demo    plan two models, replay a trace slice through a daemon, kill one of two schedulers    (make test: all tests)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
RUN    := $(VENV)/.installed-run
DEV    := $(VENV)/.installed-dev
PIP    := $(PY) -m pip install -qq --disable-pip-version-check
SOURCES := server/kvhold_server client/kvhold_client tests tools bench

IMAGE  ?= kvhold:dev
BUILDER ?= $(firstword $(shell command -v docker podman buildah 2>/dev/null))
SOCKET ?= /tmp/kvhold-$(shell id -u)/kvhold.sock
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint format proto proto-check proto-freeze bench chaos chaos-slice image clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- environments: one virtual environment, two depths -------------------------------------------------------------
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("kvhold needs Python 3.10 or newer, this is " + sys.version if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not make $(VENV); on Debian/Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUN): pyproject.toml | $(PY)
	$(PIP) -e '.[server,cli,xxhash]'
	@touch $@

$(DEV): pyproject.toml | $(PY)
	$(PIP) -e '.[dev]'
	@touch $(RUN) $@

# ---- use -----------------------------------------------------------------------------------------------------------
demo: $(RUN) ## the whole job in under two minutes
	$(BIN)/kvhold demo $(ARGS)

serve: $(RUN) ## run a daemon in the foreground on $(SOCKET)
	@mkdir -p -m 0700 $(dir $(SOCKET))
	$(BIN)/kvhold serve --socket $(SOCKET) $(ARGS)

# ---- develop -------------------------------------------------------------------------------------------------------
test: $(DEV) ## every test (ARGS='-k pool' narrows)
	$(PY) -m pytest $(ARGS)

lint: $(DEV) proto-check ## ruff, mypy --strict, buf, generated code, import directions
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy server/kvhold_server client/kvhold_client tools
	$(PY) -m pytest tests/test_tidy.py

format: $(DEV) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

proto: $(DEV) ## regenerate the committed stubs
	$(PY) tools/proto.py generate

proto-check: $(DEV)
	$(PY) tools/proto.py check

proto-freeze: $(DEV) ## make today's contract the one that later ones must not break
	$(PY) tools/proto.py freeze

bench: $(DEV) ## measure; BENCH=full for everything
	$(PY) $(firstword $(wildcard bench/run.py) bench/hashing.py) $(ARGS)

chaos: $(DEV) ## ten minutes of killing schedulers, daemon and connections (ARGS='--seed 7' repeats a run)
	$(PY) -m tests.chaos.harness --seconds 540 $(ARGS)

chaos-slice: $(DEV) ## ninety seconds of it
	$(PY) -m tests.chaos.harness --seconds 75 $(ARGS)

image: ## build the container image with docker, podman or buildah
	@test -n "$(BUILDER)" || { echo "no docker, podman or buildah found" >&2; exit 1; }
	$(BUILDER) $(if $(findstring buildah,$(BUILDER)),bud,build) -t $(IMAGE) .

-include deploy/deploy.mk

clean: ## remove everything that the targets above made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` do all set-up by themselves, with plain Python 3.11+ (and Java 17+ for Spark).

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p))))

.PHONY: setup secrets demo test matrix lint format docs bench chaos interleavings fuzz release lock clean

setup: $(VENV)/.ready

# uv where it is there, else fetched into the environment itself: it installs in seconds what takes pip
# minutes. Where there is no uv for the platform, pip does. The same locked packages each way.
INTO := $(BIN)/python --compile-bytecode

$(VENV)/.ready: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: install it, or say PYTHON=…" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: install that, or say PYTHON=…" >&2; exit 2; }
	@echo "setting up $(VENV), a minute or two: $$(grep -c '^[a-z].*==' requirements.lock) packages, Spark (400 MB) among them"
	@"$(PYTHON)" -m venv $(VENV)
	@uv="$$(command -v uv || true)"; \
	if [ -z "$$uv" ] && $(BIN)/python -m pip install --quiet uv 2>/dev/null; then uv="$(BIN)/uv"; fi; \
	if [ -n "$$uv" ]; then \
	  "$$uv" pip install --python $(INTO) --require-hashes -r requirements.lock && \
	  "$$uv" pip install --quiet --python $(INTO) --no-deps --no-build-isolation --editable .; \
	else \
	  $(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock && \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	fi
	@touch $@
	@echo "set up in $(VENV)"

# The keys and passwords of docker-compose.yml, into `deploy/secrets`. Files that exist are kept.
secrets:
	@"$(PYTHON)" deploy/write_secrets.py

demo: setup
	@$(BIN)/tidegauge demo $(ARGS)

# In two processes, one of which has the Spark that most of its tests share.
test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

# What takes too long for `make test`, and CI runs besides: about eleven minutes.
test-slow: setup
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow and not matrix" $(ARGS)

# Every operator of Spark under every trigger, in two stages, against the batch answer; executors
# and drivers killed on a cluster; whatever else takes too long for CI: about an hour and a half.
MATRIX := tests/spark/matrix tests/spark/cluster tests/spark/test_flights.py
matrix: setup
	@failed=0; \
	$(BIN)/python -m pytest -m "" $(MATRIX) $(ARGS) || failed=1; \
	$(BIN)/python -m pytest -m matrix $(foreach each,$(MATRIX),--ignore=$(each)) tests $(ARGS) || failed=1; \
	exit $$failed

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The site of the documentation, into `site/`, without a request to another host.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

# Every fault in turn, five times each, then all of them at once: about ten minutes.
chaos: setup
	@$(BIN)/python -m tests.chaos $(ARGS)

# Random requests to two replicas, so that each meets others in the middle: about five minutes.
interleavings: setup
	@$(BIN)/python -m tests.interleavings $(ARGS)

# A million made-up requests, about twenty minutes; the seed is printed. `make test` has a short version.
fuzz: setup
	@$(BIN)/python -m tests.fuzz $(ARGS)

# All files of a release, into dist/. Needs uv. Try it with ARGS=--rehearse, from any sources.
release: setup
	@$(BIN)/python deploy/release.py $(ARGS)

# Needs uv. Upgrades with ARGS=--upgrade.
lock:
	uv pip compile --quiet pyproject.toml --all-extras --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock" --output-file requirements.lock $(ARGS)
	for each in airflow dagster; do \
	  uv pip compile --quiet deploy/$$each/pyproject.toml --universal --python-version 3.11 --no-annotate \
	    --no-emit-package tidegauge --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file deploy/$$each/requirements.lock $(ARGS) || exit 1; \
	done

clean:
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Needs GNU make (3.81 or newer), a POSIX shell and Python 3.11 to 3.13; no
# compiler, no git. Everything is installed into .venv, from the lock files.
#
#   make setup PYTHON=python3.12     another interpreter (remove .venv first)
#   make decode ARGS=--config.temperature=1
#   make test JOBS=4

SHELL = /bin/sh
.NOTPARALLEL:

JOBS = 2
ARGS =
# Set from the command line or the environment to choose the interpreter.
PYTHON ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip
INSTALL := $(PIP) install --quiet --no-build-isolation
UV := uv==0.13.8

# A caller's Python and pip settings must not reach into .venv. Where packages
# come from (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, ...) stays the caller's.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE PYTHONWARNINGS
unexport PYTHONSAFEPATH PYTHONINSPECT PYTHONPLATLIBDIR PYTHONCASEOK
unexport PYTHONEXECUTABLE __PYVENV_LAUNCHER__ PYTHON
unexport PIP_PYTHON PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIREMENT PIP_EDITABLE
unexport PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_REQUIRE_HASHES PIP_NO_DEPS
unexport PIP_NO_BINARY PIP_PRE PIP_DRY_RUN PIP_IGNORE_INSTALLED PIP_UPGRADE
unexport PIP_FORCE_REINSTALL PIP_REPORT PIP_PLATFORM PIP_PYTHON_VERSION
unexport PIP_ABI PIP_IMPLEMENTATION PIP_NO_BUILD_ISOLATION
export PYTHONNOUSERSITE := 1
export PIP_USER := 0
export PIP_USE_PEP517 := 1
export PIP_REQUIRE_VIRTUALENV := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A shell fragment: leaves a suitable interpreter in $python, or stops.
CHECK := import sys, venv, ensurepip; \
  sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
DESCRIBE := import sys, importlib.util as u; \
  print("Python", sys.version.split()[0], \
  "" if u.find_spec("ensurepip") else "without ensurepip (python3-venv)")
find_python = \
  if [ -n '$(PYTHON)' ]; then set -- '$(PYTHON)'; \
  else set -- python3 python3.13 python3.12 python3.11; fi; \
  python=; \
  for candidate in "$$@"; do \
    if "$$candidate" -c '$(CHECK)' >/dev/null 2>&1; then \
      python=$$candidate; break; \
    fi; \
  done; \
  if [ -z "$$python" ]; then \
    echo "specjax needs Python 3.11, 3.12 or 3.13 with its venv module." >&2; \
    echo "Found:" >&2; \
    for candidate in "$$@"; do \
      echo "  $$candidate: $$("$$candidate" -c '$(DESCRIBE)' 2>/dev/null || \
        echo nothing that runs)" >&2; \
    done; \
    echo "Name one with: make setup PYTHON=/path/to/python3" >&2; \
    exit 1; \
  fi

.PHONY: help
help:  ## Lists the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | \
	while IFS='|' read -r name text; do \
	  printf 'make %-11s %s\n' "$$name" "$$text"; \
	done

.PHONY: setup
setup: $(VENV)/.setup.stamp  ## Creates .venv with the pinned dependencies

# An environment that was left half made, or whose interpreter is gone, is made
# anew; setuptools comes first because one dependency has no wheel.
$(VENV)/.setup.stamp: requirements.lock setup.py pyproject.toml
	@if ! $(PY) -c '$(CHECK)' >/dev/null 2>&1 || \
	  ! $(PIP) --version >/dev/null 2>&1; then \
	  $(find_python); \
	  echo "Creating $(VENV) with $$python"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing the pinned dependencies (once; a minute or two)"
	@$(INSTALL) -c requirements.lock setuptools
	@$(INSTALL) -r requirements.lock
	@$(INSTALL) --no-deps -e .
	@touch $@

$(VENV)/.test.stamp: requirements-test.lock $(VENV)/.setup.stamp
	@echo "Installing the pinned test dependencies (once)"
	@$(INSTALL) -r requirements-test.lock
	@touch $@

.PHONY: decode
decode: $(VENV)/.setup.stamp  ## Decodes a few prompts with the embedded pair
	@$(PY) -m launch.decode --config=configs/embedded.py $(ARGS)

.PHONY: chat
chat: $(VENV)/.setup.stamp  ## Fetches SmolLM2 (98 MB, once) and chats with it
	@$(PY) -m launch.tools.fetch_smollm2 >&2
	@$(PY) -m launch.chat --config=configs/smollm2.py $(ARGS)

HUB = Qwen/Qwen2.5-Coder-$(1)B-Instruct-GGUF/qwen2.5-coder-$(1)b-instruct-q4_k_m.gguf

.PHONY: pair
pair: $(VENV)/.setup.stamp  ## Fetches Qwen2.5-Coder 1.5B and 0.5B (1.6 GB, once); decodes
	@$(PY) -m launch.decode \
	  --config=configs/huggingface.py:target=$(call HUB,1.5),draft=$(call HUB,0.5) \
	  --config.drafter='model(tokens=4, weights=int8)' --config.weights=int8 $(ARGS)

$(VENV)/.serve.stamp: requirements-test.lock $(VENV)/.setup.stamp
	@echo "Installing what serves over HTTP (once)"
	@$(INSTALL) -c requirements-test.lock -e '.[serve]'
	@touch $@

.PHONY: serve
serve: $(VENV)/.serve.stamp  ## Serves SmolLM2 over HTTP, at localhost:8000
	@$(PY) -m launch.tools.fetch_smollm2 >&2
	@$(PY) -m launch.serve --config=configs/smollm2.py:batch $(ARGS)

.PHONY: evaluate
evaluate: $(VENV)/.setup.stamp  ## Does drafting pay for the embedded pair, and why
	@mkdir -p build
	@$(PY) -m launch.evaluate --config=configs/embedded.py --prompts=built-in \
	  --explain --output=build/evaluation.json $(ARGS)

# A file is one worker's, so that what its tests share is compiled once.
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile

# Pull requests run this and nothing else; CONTRIBUTING.md says what it may cost.
.PHONY: test
test: test-only lint  ## The tests that are not marked slow, and the lint: CI

.PHONY: test-only
test-only: $(VENV)/.test.stamp  ## The same without the lint
	$(PYTEST) -m "not slow" $(ARGS)

.PHONY: test-slow
test-slow: $(VENV)/.test.stamp  ## The slow ones, compiled as for users
	XLA_FLAGS= $(PYTEST) -m slow $(ARGS)

.PHONY: test-faults
test-faults: $(VENV)/.test.stamp  ## Tries the faults that tests must catch: hours
	$(PY) -m tests.faults $(ARGS)

# On a GPU after: .venv/bin/python -m pip install -e '.[cuda]'. One process, for
# one GPU; without one, the same tests on the CPU. None is of launch, whose
# packages may be missing there.
.PHONY: test-gpu
test-gpu: $(VENV)/.test.stamp  ## The tests that matter on a GPU, where jax runs
	XLA_FLAGS= $(PY) -m pytest -m gpu tests/models tests/specjax \
	  tests/test_embedded.py $(ARGS)

.PHONY: lint
lint: $(VENV)/.test.stamp  ## Checks style, format and types, changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: format
format: $(VENV)/.test.stamp  ## Formats the code and mends what is mechanical
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: notebooks
notebooks: $(VENV)/.test.stamp  ## Makes colab/*.ipynb from the scripts beside them
	@$(PY) -m jupytext --quiet --to ipynb --update --set-kernel python3 \
	  --opt notebook_metadata_filter=kernelspec,-all colab/*.py

.PHONY: docs
docs: $(VENV)/.test.stamp  ## Builds the pages and the API reference: build/docs
	$(PY) -m sphinx --fail-on-warning --keep-going -q -c docs . build/docs

.PHONY: wheel
wheel: $(VENV)/.setup.stamp  ## Builds dist/specjax-*.whl
	@rm -rf build/lib build/bdist.* dist
	@$(PIP) wheel --quiet --no-deps --no-build-isolation -w dist .
	@ls dist

# One resolution for Python 3.11 and newer on every platform. Pins that still
# fit are kept; `make lock ARGS=--upgrade` takes the newest. What torch wants
# for a GPU is left out: torch pins it itself, and its CPU build needs none.
COMPILE = build/lock/bin/uv pip compile --quiet --universal \
  --python-version 3.11 --fork-strategy fewest --no-annotate $(ARGS)

.PHONY: lock
lock:  ## Resolves requirements.lock and requirements-test.lock
	@$(find_python); "$$python" -m venv --clear build/lock
	@build/lock/bin/python -m pip install --quiet $(UV)
	@echo setuptools | $(COMPILE) --custom-compile-command 'make lock' \
	  --extra experiments -o requirements.lock setup.py - >/dev/null
	@cat requirements.lock > build/lock/all.txt
	@if [ -f requirements-test.lock ]; then \
	  sed '/^-r/d' requirements-test.lock >> build/lock/all.txt; fi
	@$(COMPILE) --no-header --extra experiments --extra test \
	  -c requirements.lock -o build/lock/all.txt setup.py >/dev/null
	@{ echo '# What the tests need on top of requirements.lock.'; \
	  echo '# Regenerate with: make lock'; \
	  echo '-r requirements.lock'; \
	  grep -v -x -F -f requirements.lock build/lock/all.txt | \
	  grep -v -E '^(cuda|nvidia|triton)'; } > build/lock/test.txt
	@mv build/lock/test.txt requirements-test.lock
	@rm -rf build/lock
	@wc -l requirements.lock requirements-test.lock

.PHONY: clean
clean:  ## Removes builds and caches (rm -rf .venv for the environment)
	rm -rf build dist specjax.egg-info .pytest_cache .ruff_cache .hypothesis
	find specjax models configs launch tests colab -name __pycache__ \
	  -type d -prune -exec rm -rf {} +

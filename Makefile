# The commands of the workbook; `make` alone lists them. Each one first makes the Python environment
# that it needs, which takes minutes once and no time afterwards.

PYTHON ?= python3
NOTEBOOKS ?=
PARAMETERS ?=

# Where Python and its packages come from:
#   a virtual or conda environment that is active, or a Kaggle or Colab image: used as it is,
#     and only what is missing there is added (conda's `base` is nobody's project: not used);
#   otherwise: .venv, made here from $(PYTHON), or from one that fits, with the tested versions in
#     .ci/constraints.txt.
ACTIVE := $(or $(VIRTUAL_ENV),$(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX)))
SPACE := $(subst ,, )
IMAGE := $(or $(KAGGLE_KERNEL_RUN_TYPE),$(COLAB_RELEASE_TAG))
ifneq ($(filter-out $(CURDIR)/.venv,$(ACTIVE)),)
  PY := "$(ACTIVE)/bin/python"
  # make, too, needs to be told which spaces are part of a name
  STATE := $(subst $(SPACE),\$(SPACE),$(ACTIVE))
else ifneq ($(IMAGE),)
  PY := $(PYTHON)
  STATE := $(or $(TMPDIR),/tmp)
else
  PY := .venv/bin/python
  STATE := .venv
  OWN := --own
endif
# empty for a .venv without a Python, or with one that was removed since
FOUND := $(shell [ -x $(PY) ] && echo $(PY))

# A stamp carries the checksum of everything that decides what gets installed.
DEV := .ci/requirements-dev.txt
KEY := $(shell cat requirements.txt $(DEV) .ci/constraints.txt .ci/install.sh | cksum | cut -d' ' -f1)
RUN_READY := $(STATE)/.workbook-run-$(KEY)
TEST_READY := $(STATE)/.workbook-test-$(KEY)

# PyTorch's threads wait for one another in a loop, where two other busy programs can make a step fifty
# times slower. Few rounds of it, and then sleep: no slower alone, twice as slow beside others.
export GOMP_SPINCOUNT ?= 1000

# Jupyter takes kernels and settings from the environment above, not from the user's home.
export JUPYTER_PREFER_ENV_PATH := 1

# JupyterLab's defaults from there ask for no news; the reader's own settings win.
ASK_NOTHING := JUPYTER_CONFIG_PATH="$(CURDIR)/.ci/jupyter$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))"

# Three tests run at a time on two cores, since some wait for processes that they start. Each has one
# thread: more threads than cores slow all of them down.
# tests/guard keeps them from changing any file of the reader's.
GUARD := PYTHONPATH="$(CURDIR)/tests/guard$(if $(PYTHONPATH),:$(PYTHONPATH))"
# Compiled modules are kept even where the environment says not to: tests start many processes, and
# pytest would rewrite each test file anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(GUARD) $(PY) -m pytest -q
SOURCES := lib tests notebooks .ci
# Where the tests are that must run alone: to look through all files would take longer than they do.
SERIAL := $(shell grep -rl --include='*.py' 'mark\.serial' tests)
# From the last, which start processes and take longest, to the first.
NOTEBOOK_FILES := $(shell ls -r notebooks/[0-9][0-9]_*.ipynb 2>/dev/null)

.PHONY: help run lab exercises race test test-all test-gpu mutants lint style ready format notebooks clean
.DEFAULT_GOAL := help

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo '  Settings: NOTEBOOKS="01 02"  PARAMETERS=name (of notebooks/parameters/name.yaml)  PYTHON=python3.12'

run: $(RUN_READY) ## run the notebooks and write the report to artifacts/report/
	@$(PY) -m lib run $(if $(PARAMETERS),--parameters $(PARAMETERS)) $(if $(NOTEBOOKS),--notebooks $(NOTEBOOKS))

lab: $(RUN_READY) ## open your copies of the notebooks, in work/, in JupyterLab
	@$(PY) -m lib notebooks copy
	@$(ASK_NOTHING) $(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) \
		--ServerApp.root_dir=. --LabApp.default_url=/lab/tree/work/00_start_here.ipynb

race: $(RUN_READY) ## race a recipe, ENTRY=my_run.py, to the target: three seeds, about three minutes
	@$(PY) -m lib race $(ENTRY)

test: style ## check everything that needs no GPU and little time
	@$(PY) -m mypy --no-error-summary & types=$$!; trap "kill $$types" INT; \
		$(PYTEST) -p no:nbval -n 3 --dist loadfile -m 'not serial and not gpu and not slow' && wait $$types
	@$(PYTEST) -p no:nbval -m 'serial and not gpu and not slow' $(SERIAL)
	@rm -rf artifacts/small/artifacts
	@$(if $(NOTEBOOK_FILES),WORKBOOK_SMALL=1 $(PYTEST) -p tests.nbval_kernels -n 3 --dist loadfile --no-loadscope-reorder \
		--nbval-lax --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg $(NOTEBOOK_FILES))

test-all: test ## the same and the slow tests
	@$(PYTEST) -p no:nbval -m 'slow and not gpu' || [ $$? -eq 5 ]

test-gpu: $(TEST_READY) ## the tests that need a CUDA device
	@$(PYTEST) -p no:nbval -m gpu

mutants: $(TEST_READY) ## change six files in hundreds of small ways; list what no test notices
	@$(PY) -m pip install --quiet --disable-pip-version-check mutmut==3.8.1
	@OMP_NUM_THREADS=1 $(PY) -m mutmut run && $(PY) -m mutmut results

exercises: $(RUN_READY) ## list which exercises are solved, and write that as JSON
	@$(PY) -m lib exercises $(if $(NOTEBOOKS),--notebooks $(NOTEBOOKS))

lint: style ## check style, types and the state of the notebooks
	@$(PY) -m mypy --no-error-summary

style: $(TEST_READY)
	@$(PY) -m ruff check --quiet $(SOURCES)
	@$(PY) -m ruff format --check --quiet $(SOURCES) || { echo 'lint: make format puts these files right'; \
		$(PY) -m ruff format --check $(SOURCES); exit 1; }
	@PYTHONPATH=. $(PY) .ci/lint_notebooks.py

format: $(TEST_READY) ## put style right, and the notebooks' metadata; runs no notebook
	@$(PY) -m ruff check --quiet --fix --exit-zero $(SOURCES)
	@$(PY) -m ruff format $(SOURCES)
	@$(PY) -m lib notebooks clean

notebooks: $(RUN_READY) ## run the notebooks and store their outputs in them, as they are committed
	@$(PY) -m lib notebooks refresh $(if $(NOTEBOOKS),--notebooks $(NOTEBOOKS))

clean: ## remove reports and caches; keeps trained models (python -m lib runs), data/ and .venv
	rm -rf artifacts/report artifacts/small artifacts/screenshots mutants .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find lib tests notebooks .ci '(' -name __pycache__ -o -name .ipynb_checkpoints ')' -exec rm -rf {} +

# An environment whose Python was removed since is made anew.
ifeq ($(OWN)$(FOUND),--own)
.PHONY: $(RUN_READY) $(TEST_READY)
endif

INSTALL = @sh .ci/install.sh $(if $(OWN),--own "$(PYTHON)",$(PY)) -r requirements.txt
STAMP = @rm -f $(STATE)/.workbook-run-* && touch $(RUN_READY)

$(RUN_READY):
	$(INSTALL)
	$(STAMP)

# What tests need has what notebooks need, too: at once, the packages are looked for once.
$(TEST_READY):
	$(INSTALL) -r $(DEV)
	$(STAMP) && rm -f $(STATE)/.workbook-test-* && touch $@

# the environment, and nothing else
ready: $(TEST_READY)

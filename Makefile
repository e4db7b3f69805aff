# Everything runs in .venv, which is made when missing and brought up to date when setup.py, pyproject.toml, csrc/ or TORCH change.
#   make install | demo | test | test-models | kill-test | experiments | lint | packaging | docs | asan | cuda | bench | clean
#   make mutants | fuzz | hostile | nox       checks of trust; see CONTRIBUTING.md
#   make properties | accuracy | resources, and properties-long | accuracy-full | resources-long: figures into bench/results/trust.json
#   TORCH="torch==2.14.1"   another torch (requirement, and pip options if it needs any)
#   PYTHON=python3.12       the interpreter that .venv is made of
#   WORKERS=4               processes that run the tests, one thread each

TORCH   ?= torch==2.13.0
PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/installed
PIP     := $(BIN)/python -m pip --disable-pip-version-check install -q
# One thread a worker: more threads than cores make small kernels many times slower.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := test
.PHONY: install demo test test-models kill-test experiments lint packaging docs asan cuda bench clean FORCE

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/continuum-ops demo

test: $(STAMP)
	$(PYTEST) -n $(WORKERS) --dist worksteal

# TORCH again, so that no package brings another torch along.
test-models: $(STAMP)
	$(PIP) $(foreach word,$(TORCH),'$(word)') -r tests/requirements-models.txt
	$(PYTEST) -m models tests/test_real_models.py tests/test_trainers.py tests/test_baselines.py \
	  tests/test_bench_attention_layers.py

# A training and a generation of samples, each killed 20 times at random, end with the bits of undisturbed ones.
kill-test: $(STAMP)
	CONTINUUM_OPS_KILLS=20 $(PYTEST) -s tests/test_resume.py tests/test_generate.py -k random_moments

# --small of every experiment that has no result yet: an hour for all of them on one core.
experiments: $(STAMP)
	$(BIN)/python bench/run_experiments.py

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

packaging: $(STAMP)
	TORCH="$(TORCH)" $(BIN)/python ci/check_packaging.py

# build/site, which needs no network and no server; --strict: a broken link is an error.
docs: $(STAMP)
	$(PIP) $(foreach word,$(TORCH),'$(word)') 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs -q build --strict

asan: $(STAMP)
	WORKERS=$(WORKERS) bash ci/sanitized_tests.sh $(BIN)/python

.PHONY: mutants fuzz hostile nox
# About an hour on one core; what was found already is kept.
mutants: $(STAMP)
	$(BIN)/python ci/mutants.py --record

SECONDS ?= 1200
fuzz: $(STAMP)
	bash ci/fuzz.sh $(BIN)/python $(SECONDS) --record

hostile: $(STAMP)
	$(PYTEST) tests/test_hostile_files.py tests/test_native_arguments.py

# Each Python that is there, in a new environment: torch is downloaded for each.
nox: $(STAMP)
	$(PIP) nox
	TORCH="$(TORCH)" $(BIN)/python -m nox

cuda: $(STAMP)
	$(BIN)/python ci/check_cuda.py

# The checks of trust (bench/README.md); each writes its figures into bench/results/trust.json.
.PHONY: properties properties-long accuracy accuracy-full resources resources-long
properties: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python bench/properties.py

properties-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python bench/properties.py --long

accuracy: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python bench/accuracy.py --short

accuracy-full: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python bench/accuracy.py

resources: $(STAMP)
	$(BIN)/python bench/resources.py

resources-long: $(STAMP)
	$(BIN)/python bench/resources.py --long

bench: $(STAMP)
	$(BIN)/python bench/bench_continuum_attention.py

# On a machine with a GPU: installs into the environment that $(PYTHON) has, tests, measures; OUT is the folder of results.
OUT ?= gpu_check
.PHONY: gpu-check preflight
gpu-check:
	$(PYTHON) bench/gpu_check.py --out $(OUT)

# The rehearsal of that without a GPU: torch 2.11.0 for CUDA, 5 GB, and Python 3.12 as PYTHON312.
PYTHON312 ?= python3.12
PREFLIGHT := .venv-preflight
preflight: $(PREFLIGHT)/ready
	$(PREFLIGHT)/bin/python -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps -e .
	OMP_NUM_THREADS=1 $(PREFLIGHT)/bin/python ci/preflight.py

$(PREFLIGHT)/ready:
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12) and "Python 3.12 is needed, $(PYTHON312) is " + sys.version.split()[0] + ": make preflight PYTHON312=...")'
	$(PYTHON312) -m venv $(PREFLIGHT) || { rm -rf $(PREFLIGHT); exit 1; }
	@echo 'Installing torch 2.11.0 for CUDA into $(PREFLIGHT) (5 GB) ...'
	$(PREFLIGHT)/bin/python -m pip --disable-pip-version-check install -q torch==2.11.0 numpy scipy hypothesis pytest 'setuptools>=77' wheel 'pybind11>=2.12' ninja
	@touch $@

clean:
	rm -rf $(VENV) $(PREFLIGHT) .nox gpu_check build dist *.egg-info continuum_ops/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without ensurepip (Debian: python3-venv) a venv is left half made; the next run must not take it for a whole one.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Rewritten only when TORCH differs from the last installation's.
$(VENV)/torch: FORCE | $(BIN)/pip
	@printf '%s\n' '$(TORCH)' | cmp -s - $@ || printf '%s\n' '$(TORCH)' > $@

$(STAMP): $(VENV)/torch setup.py pyproject.toml $(wildcard csrc/*)
	@echo 'Installing $(TORCH) and the package into $(VENV) (the kernels compile for about a minute) ...'
	$(PIP) $(foreach word,$(TORCH),'$(word)') 'setuptools>=77' wheel 'pybind11>=2.12' ninja
	$(PIP) --no-build-isolation -e '.[train,test,dev]'
	@$(BIN)/python -c 'import continuum_ops as co; print("Installed; backends:", co.backends())'
	@touch $@

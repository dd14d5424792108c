# One word per task. `make install` (or any task that needs it) creates .venv and leaves the system alone.
# VENV=... uses another virtual environment, PYTHON=... another interpreter, TORCH_VERSION=... another torch.

VENV ?= .venv
PYTHON ?= python3
REQUIREMENTS := third-party/requirements.txt
TORCH_VERSION ?= $(shell sed -n 's/^torch==//p' $(REQUIREMENTS))
RUN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.deep_ep-torch-$(TORCH_VERSION)
# Found, not listed: a new file is formatted without a change here.
CPP := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')

.PHONY: help install build demo test lint hooks tidy format fix bench accuracy smoke sanitize trials explore mutants cuda gpu clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' Makefile

$(STAMP): $(REQUIREMENTS)
	@tools/prerequisites.sh $(PYTHON)
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH_VERSION)/' $(REQUIREMENTS) > $(VENV)/requirements.txt
	$(RUN)/python -m pip install --disable-pip-version-check -q -r $(VENV)/requirements.txt
	touch $@

build: $(STAMP)  ## only the native modules, in place; shows what is built and why
	$(RUN)/python setup.py -q build_ext --inplace

install: build  ## .venv with everything in it, deep_ep in place (editable)
	$(RUN)/python -m pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .

demo: install  ## eight ranks on this machine, one of them slow: who, why, by how much
	$(RUN)/python tests/test_low_latency.py --num-processes 8 --diagnose --inject slow-rank=3:2ms

test: install  ## all tests; ARGS="-k name" selects
	@tools/test_tools.sh
	@tools/test.sh $(RUN)/python $(ARGS)
	@$(RUN)/python tools/coverage.py build/coverage.json

lint: $(STAMP)  ## style, types and spelling (.pre-commit-config.yaml); `make format` repairs most of it
	VENV=$(VENV) $(RUN)/pre-commit run --all-files

hooks: $(STAMP)  ## `make lint` before each commit, on what the commit changes
	$(RUN)/pre-commit install

tidy: $(STAMP)  ## facts about the tree (tests/tidy)
	$(RUN)/python -m pytest -q tests/tidy

format fix: $(STAMP)  ## repairs what the tools can repair
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(RUN)/clang-format -i $(CPP)

bench: install  ## dispatch + combine against gloo, both modes; what a call takes on the host, and what the counters cost
	$(RUN)/python benchmarks/low_latency_cpu.py $(ARGS)
	$(RUN)/python benchmarks/normal_cpu.py $(NORMAL)
	$(RUN)/python benchmarks/host_time.py $(HOST_TIME)
	$(if $(shell command -v valgrind),$(RUN)/python benchmarks/counters_overhead.py $(OVERHEAD),@echo "counters_overhead.py left out: apt-get install valgrind")

accuracy: install  ## who is right about injected faults, generated and real, and what verdicts cost
	$(RUN)/python benchmarks/diagnosis_accuracy.py $(ARGS)
	$(RUN)/python benchmarks/diagnosis_accuracy.py --real
	$(RUN)/python benchmarks/diagnosis_cost.py

smoke: ARGS = --num-processes 2 --num-tokens 16 --rounds 3
smoke: NORMAL = --num-processes 4 --num-tokens 64 --hidden 1024 --num-experts 16 --rounds 1
smoke: HOST_TIME = --quick
smoke: OVERHEAD = --only low-latency
smoke: bench  ## all benchmarks in small: do they still run?
	$(RUN)/python benchmarks/diagnosis_accuracy.py --quick --windows 0.1
	$(RUN)/python benchmarks/diagnosis_cost.py --quick
	$(RUN)/python benchmarks/trace_time.py --megabytes 20

sanitize: $(STAMP)  ## C++ tests under address, undefined and thread sanitizers
	$(RUN)/python tools/sanitize.py $(ARGS)

trials: install  ## faults in groups of real processes: is the right rank named? ARGS="--trials 300"
	$(RUN)/python tools/trials.py $(ARGS)

SECONDS ?= 600
explore: install  ## looks for faults of the protocol in new random programs; SECONDS=600
	$(RUN)/python tools/explore.py --seconds $(SECONDS) $(ARGS)

mutants: $(STAMP)  ## single faults put into the source: which test notices each; ARGS="part of a name"
	$(RUN)/python tools/mutants.py $(ARGS)

third-party/nvshmem: | $(STAMP)
	./install_nvshmem.sh

cuda: $(STAMP) third-party/nvshmem  ## both CUDA modules: build, link, load, resources of each kernel, audit of the machine code
	DEEP_EP_CUDA=1 $(RUN)/python setup.py -q build_ext --inplace
	$(RUN)/python -c "import deep_ep._cuda, deep_ep._cuda_nvshmem; print('both modules load')"
	$(RUN)/python tools/kernel_resources.py --check
	$(RUN)/python tools/machine_code.py

gpu:  ## on a machine with a GPU, its own torch and nvcc: build, compare, try, measure; ARGS=--dry-run without one
	$(PYTHON) tools/gpu.py $(ARGS)

clean:  ## what was built, without .venv and third-party/nvshmem
	rm -rf build deep_ep/*.so *.egg-info

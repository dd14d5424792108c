# One word per task. `make install` (or any task that needs it) creates .venv and leaves the system alone.
# VENV=... uses another virtual environment, PYTHON=... another interpreter, TORCH_VERSION=... another torch.

VENV ?= .venv
PYTHON ?= python3
REQUIREMENTS := third-party/requirements.txt
TORCH_VERSION ?= $(shell sed -n 's/^torch==//p' $(REQUIREMENTS))
RUN := $(abspath $(VENV))/bin
BUILDERS := third-party/requirements-build.txt
BUILT_WITH := $(VENV)/.deep_ep-build
STAMP := $(VENV)/.deep_ep-torch-$(TORCH_VERSION)
DEVELOPERS := third-party/requirements-dev.txt
TOOLS := $(VENV)/.deep_ep-tools
# Found, not listed: a new file is formatted without a change here.
CPP := $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')

.PHONY: help install build demo test test-all lint hooks tidy format fix bench accuracy smoke sanitize trials explore mutants cuda gpu clean

help:  ## this list
	@sed -n 's/^\([a-z -]*\):.*##/\1\t/p' Makefile

$(BUILT_WITH): $(BUILDERS)
	@tools/prerequisites.sh $(PYTHON)
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --disable-pip-version-check -q --no-compile -r $(BUILDERS)
	touch $@

# Not compiled: of torch's modules few are ever imported, and those are compiled then.
# One torch is there at a time, so one stamp: what is asked for again later is installed again.
$(STAMP): $(REQUIREMENTS) | $(BUILT_WITH)
	rm -f $(VENV)/.deep_ep-torch-*
	sed 's/^torch==.*/torch==$(TORCH_VERSION)/' $(REQUIREMENTS) > $(VENV)/requirements.txt
	$(RUN)/python -m pip install --disable-pip-version-check -q --no-compile -r $(VENV)/requirements.txt
	touch $@

$(TOOLS): $(DEVELOPERS) | $(STAMP)
	$(RUN)/python -m pip install --disable-pip-version-check -q -r $(DEVELOPERS)
	touch $@

# What a newcomer runs is done before the CUDA modules would be built.
demo test: export DEEP_EP_CUDA := $(or $(DEEP_EP_CUDA),0)

build: $(BUILT_WITH)  ## only the native modules, in place; shows what is built and why
	$(RUN)/python setup.py -q build_ext --inplace

# Torch is unpacked while the modules are compiled.
install:  ## .venv with what deep_ep needs in it, deep_ep in place (editable)
	@$(MAKE) --no-print-directory -j3 build $(STAMP)
	$(RUN)/python -m pip install --disable-pip-version-check -q --no-compile --no-build-isolation --no-deps -e .

demo: install  ## eight ranks on this machine, one of them slow: who, why, by how much
	$(RUN)/python tests/test_low_latency.py --num-processes 8 --quick --diagnose --inject slow-rank=3:2ms

test: install $(TOOLS)  ## tests that a newcomer runs, CPU module only; ARGS="-k name" selects from all
	@tools/test_tools.sh
	@tools/test.sh $(RUN)/python $(ARGS)
	@$(RUN)/python tools/coverage.py build/coverage.json

test-all: install $(TOOLS)  ## also the runner of make gpu, model checking, mutants, litmus, trials, sanitizers
	@tools/test_tools.sh
	@tools/test.sh $(RUN)/python $(or $(ARGS),--all)
	@$(RUN)/python tools/coverage.py build/coverage.json

lint: $(TOOLS)  ## style, types and spelling (.pre-commit-config.yaml); `make format` repairs most of it
	VENV=$(VENV) $(RUN)/pre-commit run --all-files

hooks: $(TOOLS)  ## `make lint` before each commit, on what the commit changes
	$(RUN)/pre-commit install

tidy: $(TOOLS)  ## facts about the tree (tests/tidy)
	$(RUN)/python -m pytest -q -m "not exhaustive" tests/tidy

format fix: $(TOOLS)  ## repairs what the tools can repair
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(RUN)/clang-format -i $(CPP)

bench: install $(TOOLS)  ## dispatch + combine against gloo, both modes; what a call takes on the host, and what the counters cost
	$(RUN)/python benchmarks/low_latency_cpu.py $(ARGS)
	$(RUN)/python benchmarks/normal_cpu.py $(NORMAL)
	$(RUN)/python benchmarks/host_time.py $(HOST_TIME)
	$(if $(shell command -v valgrind),$(RUN)/python benchmarks/counters_overhead.py $(OVERHEAD),@echo "counters_overhead.py left out: apt-get install valgrind")

accuracy: install $(TOOLS)  ## who is right about injected faults, generated and real, and what verdicts cost
	$(RUN)/python benchmarks/diagnosis_accuracy.py $(ARGS)
	$(RUN)/python benchmarks/diagnosis_accuracy.py --real
	$(RUN)/python benchmarks/diagnosis_cost.py

smoke: ARGS = --num-processes 2 --num-tokens 16 --rounds 3
smoke: NORMAL = --num-processes 4 --num-tokens 64 --hidden 1024 --num-experts 16 --rounds 1
smoke: HOST_TIME = --quick
smoke: OVERHEAD = --only low-latency
smoke: bench  ## all benchmarks in small: do they still run?
	$(RUN)/python benchmarks/diagnosis_accuracy.py --quick --windows 0.1 --group 3x4 2x4
	$(RUN)/python benchmarks/diagnosis_cost.py --quick
	$(RUN)/python benchmarks/trace_time.py --megabytes 20

sanitize: $(TOOLS)  ## C++ tests under address, undefined and thread sanitizers
	$(RUN)/python tools/sanitize.py $(ARGS)

trials: install $(TOOLS)  ## faults in groups of real processes: is the right rank named? ARGS="--trials 300"
	$(RUN)/python tools/trials.py $(ARGS)

SECONDS ?= 600
explore: install $(TOOLS)  ## looks for faults of the protocol in new random programs; SECONDS=600
	$(RUN)/python tools/explore.py --seconds $(SECONDS) $(ARGS)

mutants: $(TOOLS)  ## single faults put into the source: which test notices each; ARGS="part of a name"
	$(RUN)/python tools/mutants.py $(ARGS)

third-party/nvshmem: | $(STAMP)
	./install_nvshmem.sh

cuda: $(TOOLS) third-party/nvshmem  ## both CUDA modules: build, link, load, resources of each kernel, audit and counts of the machine code
	DEEP_EP_CUDA=1 $(RUN)/python setup.py -q build_ext --inplace
	$(RUN)/python -c "import deep_ep._cuda, deep_ep._cuda_nvshmem; print('both modules load')"
	$(RUN)/python tools/kernel_resources.py --check
	$(RUN)/python tools/machine_code.py
	$(RUN)/python tools/instruction_counts.py

gpu:  ## on a machine with a GPU, its own torch and nvcc: build, compare, try, measure
	$(PYTHON) tools/gpu.py $(ARGS)

clean:  ## what was built, without .venv and third-party/nvshmem
	rm -rf build deep_ep/*.so *.egg-info

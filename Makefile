# The commands of the repository; `make help` lists them. Each does all of its own set-up, once: a virtual environment in
# .venv, the packages that it needs, at the versions of requirements.txt, and the extension, compiled again whenever its
# sources change. What CI runs is in .ci/run; how the extension is compiled is in setup.py.

PYTHON ?= python3
# Processes of pytest-xdist, and whatever else pytest should get. Each begins with a part of the files, whose models and
# fixtures it then makes alone; those that are done early take from the others.
PYTEST_ARGS ?= -n auto --dist worksteal
DEMO_ARGS ?= --max-new-tokens 96 --repetition-penalty 1.15
# Where wikitext2.test.raw and the JSON lines of the tasks are, and how many items of each task are taken.
QUALITY_TEXT ?= wikitext2.test.raw
QUALITY_TASKS ?= zero_shot
QUALITY_LIMIT ?= 200
# The oldest transformers that pyproject.toml accepts, beside the pinned one, and the tests of what touches it.
OLDEST := build/oldest
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLDEST_TESTS := $(addprefix tests/test_,cache.py generate.py patching.py attention.py own_attention.py cache_file.py \
                  compile.py capture.py encoder_decoder.py)
CUDA_ARCHS ?= 90
# What `make hub` checks with, beside the virtual environment.
HUB_TOOLS := build/hub-tools
# What `make lint-workflows` checks with: an environment of its own, for runners without the packages of `make lint`.
WORKFLOW_TOOLS := build/workflow-tools
SANITIZER ?= compute-sanitizer
SANITIZE_TOOLS ?= memcheck racecheck initcheck
# What `make mutate` breaks: parts of the names of files, all of its list without.
MUTATIONS ?=
# How many times as many op calls are drawn under the sanitizers as in all tests.
FUZZ ?= 2

VENV := .venv
BIN := $(VENV)/bin
# What compiles the extension; the package, with it; and, for all but `make demo`, what tests, evaluations and checks need.
TOOLS := $(VENV)/tools.stamp
INSTALLED := $(VENV)/installed.stamp
PACKAGES := $(VENV)/packages.stamp
DOCS := $(VENV)/docs.stamp
READY := $(INSTALLED) $(PACKAGES)
# What makes and checks wheels, and the oldest Linux that they run on: glibc 2.28, as in RHEL 8, Debian 10, Ubuntu 18.10.
WHEEL_TOOLS := $(VENV)/wheel.stamp
WHEEL_TAG := manylinux_2_28_$(shell uname -m)
# A line when a step begins, and one with its time: $(call step,name,commands)
step = @start=$$(date +%s); echo "--- $(1)"; $(2) && echo "--- $(1): $$(($$(date +%s) - start)) s"
# A Python named on the command line has the package and pytest already; without one, .venv is made to have them.
IS_PYTHON_GIVEN := $(filter command environment,$(origin PYTHON))
SANITIZE_PYTHON := $(if $(IS_PYTHON_GIVEN),$(PYTHON),$(BIN)/python)
BUILD_INPUTS := setup.py pyproject.toml $(shell find csrc -type f)
QUALITY_AVERAGED := piqa arc_easy arc_challenge hellaswag winogrande
QUALITY_PRESETS := int8 k8v4 int4 int4-g32 int4-channel fp8
ISSUE_FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
DEMO_PROMPTS := $(sort $(wildcard evals/demo_prompts/*.txt))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
# Where setup.py puts the package with CPU kernels under the sanitizers, and what their tests are: each op against the
# reference, over every instruction set of the machine, and fuzzing.
SANITIZED := build/sanitized/lib
SANITIZED_TESTS := $(addprefix tests/test_,ops.py ring_ops.py transforms.py windows.py blocks.py op_arguments.py) \
    -k "(cpu- or op_arguments) and not compile and not two_gigabytes and not codes_are_those_of_the_reference"
# Torch is not instrumented, so libasan is preloaded; libstdc++ too, for libasan to find where exceptions are thrown.
PRELOAD = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)

.PHONY: help setup demo quality test test-all mutate oldest sanitize sanitize-cpu lint lint-workflows format types cuda \
    headers wheel docs hub clean distclean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## virtual environment, pinned packages, extension

demo: $(INSTALLED)  ## continue real prompts with the reference model under none, int8 and int4
	HF_HUB_OFFLINE=1 $(BIN)/hf-kvquant generate evals/reference_model $(DEMO_PROMPTS:%=--prompt-file %) $(DEMO_ARGS)

# Measured into build/, so that the tree stays as the commit that results name, and an interrupted run goes on there.
quality: $(READY)  ## measure the README's quality table anew, and render it (QUALITY_TEXT=FILE QUALITY_TASKS=DIR)
	mkdir -p build/quality
	$(BIN)/python evals/fidelity.py --data $(QUALITY_TEXT) --tokens 16384 --chunk 128 \
	    --record build/quality/record.json --output build/quality/fidelity.json
	$(BIN)/hf-kvquant eval tasks evals/reference_model --data $(QUALITY_TASKS) --tasks $(QUALITY_AVERAGED) \
	    $(QUALITY_PRESETS:%=--preset %) --limit $(QUALITY_LIMIT) --dtype float32 --device cpu \
	    --output build/quality/tasks.json
	mv build/quality/fidelity.json build/quality/tasks.json evals/results/
	rm -r build/quality
	$(BIN)/python evals/render_readme.py

test: $(READY)  ## the tests to run before a commit: every test, a choice of its cases
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(READY)  ## every case of every test
	$(BIN)/python -m pytest --all $(PYTEST_ARGS)

mutate: $(READY)  ## break one line at a time, and say which test notices (takes hours; MUTATIONS=storage for a file)
	$(BIN)/python tests/mutate.py $(MUTATIONS)

oldest: $(OLDEST)/stamp  ## tests of the cache and of generation under the oldest transformers that is accepted
	PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest $(PYTEST_ARGS) $(OLDEST_TESTS)

# Every tensor gets memory of its own, so that a read behind its end is one. CUDA calls that fail on purpose, as torch's
# look for devices, are not reported.
sanitize: $(if $(IS_PYTHON_GIVEN),,$(READY))  ## CUDA kernels under memcheck, racecheck and initcheck (needs a GPU)
	@for tool in $(SANITIZE_TOOLS); do \
	    echo "$$tool:" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --report-api-errors no \
	    --error-exitcode 1 $(SANITIZE_PYTHON) -m pytest -q -p no:benchmark -m sanitize -k "not cpu" || exit 1; \
	done

# pytest by its own name, since `python -m pytest` would find the package of this folder. Python and torch leak on
# purpose; what is freed stays out of use for less than the usual 256 MB, which are slow to fault in. What a sanitizer
# says before it ends the process goes past Python, where pytest would keep it to itself but for --capture=sys.
sanitize-cpu: $(PACKAGES)  ## CPU kernels' tests, and fuzzing, under the address and undefined-behaviour sanitizers
	HF_KVQUANT_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-lib $(SANITIZED)
	export LD_PRELOAD="$(PRELOAD)" PYTHONPATH=$(CURDIR)/$(SANITIZED) HF_KVQUANT_FUZZ=$(FUZZ) \
	    UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0:malloc_context_size=4:quarantine_size_mb=32 && \
	$(BIN)/pytest -q --capture=sys $(PYTEST_ARGS) $(SANITIZED_TESTS) && \
	$(BIN)/pytest -q --capture=sys $(PYTEST_ARGS) -m sanitize tests/test_extreme_values.py && \
	$(BIN)/pytest -q --capture=sys --all $(PYTEST_ARGS) tests/test_fuzz_ops.py

lint: $(PACKAGES)  ## ruff: errors and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-workflows: $(WORKFLOW_TOOLS)/stamp  ## schemas of workflows, issue forms and CITATION.cff, an audit of the workflows
	$(call step,checking schemas,check() { $(WORKFLOW_TOOLS)/bin/check-jsonschema --builtin-schema vendor.$$@; } && \
	    check github-workflows .github/workflows/*.yml && \
	    check github-issue-config .github/ISSUE_TEMPLATE/config.yml && \
	    check github-issue-forms $(ISSUE_FORMS) && check citation-file-format CITATION.cff)
	$(call step,auditing the workflows,$(WORKFLOW_TOOLS)/bin/zizmor --offline --quiet .github)

format: $(PACKAGES)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(PACKAGES)  ## mypy, strict, on the package
	$(BIN)/mypy

cuda: $(INSTALLED)  ## compile the CUDA kernels too, for CUDA_ARCHS (needs nvcc, no GPU)
	$(call step,compiling for $(CUDA_ARCHS),HF_KVQUANT_CUDA_ARCHS="$(CUDA_ARCHS)" $(BIN)/python setup.py build_ext --inplace)

headers: $(PACKAGES)  ## compile against the headers of the oldest and the newest torch (downloads both)
	BIN=$(BIN) .ci/headers

# auditwheel fails where the wheel needs more than its tag promises. torch's libraries are those of the torch that is
# imported, so they are not copied into the wheel.
wheel: $(WHEEL_TOOLS)  ## a manylinux_2_28 wheel in dist/, built in isolation, with CUDA kernels where nvcc is (Linux)
	rm -rf build/wheel dist/hf_kvquant-*.whl
	$(call step,building the wheel,HF_KVQUANT_MANYLINUX=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .)
	$(call step,giving it the tag $(WHEEL_TAG),PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --only-plat \
	    --plat $(WHEEL_TAG) --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/hf_kvquant-*.whl)
	$(call step,checking its use of the stable ABI,$(BIN)/abi3audit --strict dist/hf_kvquant-*.whl)
	@du -h dist/hf_kvquant-*.whl

docs: $(DOCS)  ## the pages of docs/ as a site in build/docs, links checked (Python 3.11 or later; no network)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

hub: $(HUB_TOOLS)/stamp  ## the ops alone for the kernels hub, in build/hub, checked by the hub's own packages
	$(call step,building for the hub,HF_KVQUANT_MANYLINUX=1 PYTHONPATH=$(HUB_TOOLS) $(BIN)/python hub/build.py)
	$(call step,checking,PYTHONPATH=$(HUB_TOOLS) PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 $(BIN)/python hub/check.py \
	    build/hub)

clean:  ## remove what was built, keep .venv
	rm -rf build dist *.egg-info hf_kvquant/*.so $(INSTALLED)

distclean: clean  ## remove .venv too
	rm -rf $(VENV)

$(TOOLS): requirements.txt
	@$(PYTHON) -c "import sys; raise SystemExit(sys.version_info < (3, 10) and \
	    f'make: PYTHON must be Python 3.10 or later, got {sys.version.split()[0]}. make PYTHON=python3.11 ...')"
	$(call step,installing torch and what compiles,$(PYTHON) -m venv $(VENV) && \
	    $(BIN)/pip install --quiet --constraint requirements.txt torch ninja setuptools wheel)
	@touch $@

# Compiled before it is installed, since pip would not show how it goes.
$(INSTALLED): $(TOOLS) $(BUILD_INPUTS)
	$(call step,compiling,$(BIN)/python setup.py build_ext --inplace)
	$(call step,installing the package,$(BIN)/pip install --quiet --constraint requirements.txt --no-build-isolation \
	    --editable .)
	@touch $@

$(PACKAGES): $(TOOLS)
	$(call step,installing what tests and checks need,$(BIN)/pip install --quiet --requirement requirements.txt)
	@touch $@

$(DOCS): docs/requirements.txt $(PACKAGES)
	$(call step,installing what the pages need,$(BIN)/pip install --quiet --constraint requirements.txt \
	    --requirement docs/requirements.txt)
	@touch $@

$(WHEEL_TOOLS): requirements-wheel.txt $(TOOLS)
	$(call step,installing what makes wheels,$(BIN)/pip install --quiet --constraint requirements.txt \
	    --requirement requirements-wheel.txt)
	@touch $@

$(OLDEST)/stamp: pyproject.toml | $(READY)
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --target $(OLDEST) "transformers==$(OLDEST_TRANSFORMERS)"
	@touch $@

$(HUB_TOOLS)/stamp: hub/requirements.txt | $(TOOLS)
	rm -rf $(HUB_TOOLS)
	$(call step,installing what checks for the hub,$(BIN)/pip install --quiet --target $(HUB_TOOLS) \
	    --requirement hub/requirements.txt)
	@touch $@

$(WORKFLOW_TOOLS)/stamp: .github/requirements.txt
	rm -rf $(WORKFLOW_TOOLS)
	$(call step,installing what checks workflows,$(PYTHON) -m venv $(WORKFLOW_TOOLS) && \
	    $(WORKFLOW_TOOLS)/bin/pip install --quiet --requirement $<)
	@touch $@

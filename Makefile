# The commands of the repository; `make help` lists them. Each does its own set-up once: a virtual environment in .venv,
# the packages that it needs, at the versions of requirements.txt, and the extension, which is compiled again when its
# sources change. .ci/run says what CI runs, setup.py how the extension is compiled.

PYTHON ?= python3
# Options of pytest, above all for its processes (pytest-xdist). Each process starts with a share of the files, so that
# it alone makes their models and fixtures; processes that finish early take tests from the others.
PYTEST_ARGS ?= -n auto --dist worksteal
DEMO_ARGS ?= --max-new-tokens 96 --repetition-penalty 1.15
# Where wikitext2.test.raw and the JSON lines of the tasks are, and how many items of each task are used.
QUALITY_TEXT ?= wikitext2.test.raw
QUALITY_TASKS ?= zero_shot
QUALITY_LIMIT ?= 200
# The oldest transformers that pyproject.toml accepts, installed besides the pinned one, and the tests of what uses it.
OLDEST := build/oldest
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLDEST_TESTS := $(addprefix tests/test_,cache.py generate.py patching.py attention.py own_attention.py cache_file.py \
                  compile.py capture.py encoder_decoder.py latent.py upstream.py)
# The newest releases that the index has, in an environment that takes all else from that of `make setup`, and the tests
# of what uses them. A CUDA build of torch takes several GB: name the others alone to leave it out.
NEWEST := build/newest
NEWEST_PACKAGES ?= transformers peft accelerate lm-eval torch
NEWEST_TESTS := $(sort $(OLDEST_TESTS) $(addprefix tests/test_,adapters.py batching.py batching_pages.py \
                  batching_support.py eval_tasks.py families.py hybrids.py offloading.py parallel.py serve.py))
CUDA_ARCHS ?= 90
# Packages of `make hub`, besides the virtual environment.
HUB_TOOLS := build/hub-tools
# The environment of `make lint-workflows`, apart so that it runs without the packages of `make lint`.
WORKFLOW_TOOLS := build/workflow-tools
SANITIZER ?= compute-sanitizer
SANITIZE_TOOLS ?= memcheck racecheck initcheck
# The files that `make mutate` breaks, by parts of their names; empty: all files of its list.
MUTATIONS ?=
# The sanitizers run this many times as many random op calls as `make test`.
FUZZ ?= 4

VENV := .venv
BIN := $(VENV)/bin
# Stamps: tools that compile the extension; the extension; the package; packages for tests, evaluations and checks (which
# `make demo` does not need).
TOOLS := $(VENV)/tools.stamp
COMPILED := $(VENV)/compiled.stamp
INSTALLED := $(VENV)/installed.stamp
PACKAGES := $(VENV)/packages.stamp
DOCS := $(VENV)/docs.stamp
READY := $(INSTALLED) $(PACKAGES)
# Tools that make and check wheels, and the oldest Linux that wheels run on: glibc 2.28, as in RHEL 8, Debian 10 and
# Ubuntu 18.10.
WHEEL_TOOLS := $(VENV)/wheel.stamp
WHEEL_TAG := manylinux_2_28_$(shell uname -m)
# Prints a line when a step begins, and one with its time when it ends: $(call step,name,commands)
step = @start=$$(date +%s); echo "--- $(1)"; $(2) && echo "--- $(1): $$(($$(date +%s) - start)) s"
# A Python named on the command line must already have the package and pytest; without one, .venv is set up.
IS_PYTHON_GIVEN := $(filter command environment,$(origin PYTHON))
SANITIZE_PYTHON := $(if $(IS_PYTHON_GIVEN),$(PYTHON),$(BIN)/python)
# The tests that run something on a GPU if there is one.
GPU_TESTS = $(filter-out $(addprefix tests/test_,cli.py evals.py hub.py import.py readme.py report.py), \
    $(shell grep -lE 'engine|"cuda"|cuda\.is_available' tests/test_*.py))
BUILD_INPUTS := setup.py pyproject.toml $(shell find csrc -type f)
QUALITY_AVERAGED := piqa arc_easy arc_challenge hellaswag winogrande
QUALITY_PRESETS := int8 k8v4 int4 int4-channel int4-token int4-g32 k4v2 int2 fp8
ISSUE_FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
DEMO_PROMPTS := $(sort $(wildcard evals/demo_prompts/*.txt))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
# Where setup.py puts the package with sanitized CPU kernels, and the tests that run on it: each op against the
# reference, with every instruction set of the machine, and fuzzing. One run, since torch starts slowly there. Left out are
# tests that call ops as others do.
SANITIZED := build/sanitized/lib
SANITIZED_OPS := (cpu- or op_arguments) and not (compile or two_gigabytes or codes_are_those_of_the_reference or \
    equal_calls or opcheck)
SANITIZED_TESTS := $(addprefix tests/test_,ops.py ring_ops.py transforms.py windows.py blocks.py op_arguments.py \
    extreme_values.py fuzz_ops.py latent_ops.py) \
    -k "($(SANITIZED_OPS) and not extreme_values) or (extreme_values and sanitize) or fuzz_ops"
# Python and torch are not instrumented, so libasan is preloaded; libstdc++ too, so that libasan sees exceptions thrown.
PRELOAD = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)

.PHONY: help setup demo quality real-model test test-all test-gpu mutate oldest newest sanitize sanitize-cpu lint lint-workflows format types cuda \
    headers wheel docs hub clean distclean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make the virtual environment, install the pinned packages, compile the extension

demo: $(INSTALLED)  ## continue real prompts with the reference model under none, int8 and int4
	HF_HUB_OFFLINE=1 $(BIN)/hf-kvquant generate evals/reference_model $(DEMO_PROMPTS:%=--prompt-file %) $(DEMO_ARGS)

# Results go to build/ first, so that the tree stays that of the commit they name, and an interrupted run can resume.
quality: $(READY)  ## measure quality again, and render its tables (QUALITY_TEXT=FILE QUALITY_TASKS=DIR)
	mkdir -p build/quality
	$(BIN)/python evals/fidelity.py --data $(QUALITY_TEXT) --tokens 16384 --chunk 32 \
	    --record build/quality/record.json --output build/quality/fidelity.json
	$(BIN)/hf-kvquant eval tasks evals/reference_model --data $(QUALITY_TASKS) --tasks $(QUALITY_AVERAGED) \
	    $(QUALITY_PRESETS:%=--preset %) --limit $(QUALITY_LIMIT) --dtype float32 --device cpu \
	    --output build/quality/tasks.json
	mv build/quality/fidelity.json build/quality/tasks.json evals/results/
	rm -r build/quality
	$(BIN)/python evals/render_readme.py

real-model: $(READY)  ## make a checkpoint of a real pretrained model in build/real-model (downloads 93 MB)
	$(BIN)/python evals/real_model/make.py build/real-model

test: $(READY)  ## run the tests before a commit: every test, with a selection of its cases
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(READY)  ## run every case of every test
	$(BIN)/python -m pytest --all $(PYTEST_ARGS)

test-gpu: $(if $(IS_PYTHON_GIVEN),,$(READY))  ## run the tests of kernels, graphs and batching (needs a GPU)
	$(SANITIZE_PYTHON) -m pytest -q -p no:benchmark $(PYTEST_ARGS) $(GPU_TESTS)

mutate: $(READY)  ## break one line at a time and see which test fails (takes hours; MUTATIONS=storage for one file)
	$(BIN)/python tests/mutate.py $(MUTATIONS)

oldest: $(OLDEST)/stamp  ## test cache and generation with the oldest supported transformers
	PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest $(PYTEST_ARGS) $(OLDEST_TESTS)

# pip counts what the other environment has as installed, so here is only what is newer. Tests run if anything is. With
# NEWEST_PACKAGES=transformers==5.23.0, they run with that.
newest: $(READY)  ## test with the newest transformers, peft, accelerate, lm-eval and torch (NEWEST_PACKAGES="..." for some)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv --without-pip $(NEWEST)
	echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/*/site-packages)')" \
	    >"$$(echo $(NEWEST)/lib/*/site-packages)/pinned.pth"
	$(call step,installing what is newer,PIP_CONSTRAINT=/dev/null $(NEWEST)/bin/python -m pip install --quiet --upgrade \
	    $(NEWEST_PACKAGES))
	@newer="$$(cd $(NEWEST)/lib/*/site-packages && ls -d *.dist-info 2>/dev/null | sed 's/.dist-info//' | tr '\n' ' ')"; \
	if [ -z "$$newer" ]; then echo "nothing is newer than requirements.txt, which make test has tested"; else \
	echo "newer: $$newer" && $(NEWEST)/bin/python -m pytest $(PYTEST_ARGS) $(NEWEST_TESTS); fi

# Every tensor gets its own memory, so that a read past its end is detected. CUDA calls that fail on purpose, such as
# torch's search for devices, are not reported.
sanitize: $(if $(IS_PYTHON_GIVEN),,$(READY))  ## test CUDA kernels under memcheck, racecheck and initcheck (needs a GPU)
	@for tool in $(SANITIZE_TOOLS); do \
	    echo "$$tool:" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --report-api-errors no \
	    --error-exitcode 1 $(SANITIZE_PYTHON) -m pytest -q -p no:benchmark -m sanitize -k "not cpu" $(GPU_TESTS) || exit 1; \
	done

# Calls pytest by its own name, since `python -m pytest` would import the package of this folder. Python and torch leak
# on purpose, so leaks are not detected. The quarantine of freed memory is smaller than the usual 256 MB, which are slow
# to fault in. A sanitizer's report bypasses Python's stdout and stderr; --capture=sys keeps pytest from swallowing it.
sanitize-cpu: $(PACKAGES)  ## test and fuzz CPU kernels under the address and undefined-behaviour sanitizers
	HF_KVQUANT_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-lib $(SANITIZED)
	export LD_PRELOAD="$(PRELOAD)" PYTHONPATH=$(CURDIR)/$(SANITIZED) HF_KVQUANT_FUZZ=$(FUZZ) \
	    UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=0:malloc_context_size=4:quarantine_size_mb=32 && \
	$(BIN)/pytest -q --capture=sys $(PYTEST_ARGS) $(SANITIZED_TESTS)

lint: $(PACKAGES)  ## check errors and format with ruff, and that imports point one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=evals $(BIN)/lint-imports --no-logo

lint-workflows: $(WORKFLOW_TOOLS)/stamp  ## validate workflows, issue forms, CITATION.cff and Containerfile, and audit the workflows
	$(call step,checking schemas,check() { $(WORKFLOW_TOOLS)/bin/check-jsonschema --builtin-schema vendor.$$@; } && \
	    check github-workflows .github/workflows/*.yml && \
	    check github-issue-config .github/ISSUE_TEMPLATE/config.yml && \
	    check github-issue-forms $(ISSUE_FORMS) && check citation-file-format CITATION.cff)
	$(call step,auditing the workflows,$(WORKFLOW_TOOLS)/bin/zizmor --offline --quiet .github)
	$(call step,checking the Containerfile,$(WORKFLOW_TOOLS)/bin/hadolint Containerfile)

format: $(PACKAGES)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(PACKAGES)  ## check the types of the package with mypy, strict
	$(BIN)/mypy

cuda: $(INSTALLED)  ## compile the CUDA kernels, too, for CUDA_ARCHS (needs nvcc, but no GPU)
	$(call step,compiling for $(CUDA_ARCHS),HF_KVQUANT_CUDA_ARCHS="$(CUDA_ARCHS)" $(BIN)/python setup.py build_ext --inplace)

headers: $(PACKAGES)  ## compile against the headers of the oldest and the newest torch (downloads both)
	BIN=$(BIN) .ci/headers

# auditwheel fails if the wheel needs more than its tag promises. torch's libraries come from the torch that is
# imported, so they are not copied into the wheel.
wheel: $(WHEEL_TOOLS)  ## build a manylinux_2_28 wheel in dist/, with CUDA kernels if there is an nvcc (Linux)
	rm -rf build/wheel dist/hf_kvquant-*.whl
	$(call step,building the wheel,HF_KVQUANT_MANYLINUX=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .)
	$(call step,tagging it $(WHEEL_TAG),PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --only-plat \
	    --plat $(WHEEL_TAG) --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/hf_kvquant-*.whl)
	$(call step,checking that it uses the stable ABI only,$(BIN)/abi3audit --strict dist/hf_kvquant-*.whl)
	@du -h dist/hf_kvquant-*.whl

docs: $(DOCS)  ## build docs/ as a site in build/docs and check links (Python 3.11 or later; no network)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

hub: $(HUB_TOOLS)/stamp  ## build the ops for the kernels hub in build/hub, and check them with the hub's packages
	$(call step,building for the hub,HF_KVQUANT_MANYLINUX=1 PYTHONPATH=$(HUB_TOOLS) $(BIN)/python hub/build.py)
	$(call step,checking,PYTHONPATH=$(HUB_TOOLS) PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 $(BIN)/python hub/check.py \
	    build/hub)

clean:  ## remove what was built, keep .venv
	rm -rf build dist *.egg-info hf_kvquant/*.so $(COMPILED) $(INSTALLED)

distclean: clean  ## remove .venv too
	rm -rf $(VENV)

$(TOOLS): requirements.txt
	@$(PYTHON) -c "import sys; raise SystemExit(sys.version_info < (3, 10) and \
	    f'make: PYTHON must be Python 3.10 or later, got {sys.version.split()[0]}. make PYTHON=python3.11 ...')"
	$(call step,installing torch and build tools,$(PYTHON) -m venv $(VENV) && \
	    $(BIN)/pip install --quiet --constraint requirements.txt torch ninja setuptools wheel)
	@touch $@

# Compiles before installing, since pip would not show the progress.
$(COMPILED): $(TOOLS) $(BUILD_INPUTS)
	$(call step,compiling,$(BIN)/python setup.py build_ext --inplace)
	@touch $@

$(INSTALLED): $(COMPILED)
	$(call step,installing the package,$(BIN)/pip install --quiet --constraint requirements.txt --no-build-isolation \
	    --editable .)
	@touch $@

$(PACKAGES): $(TOOLS)
	$(call step,installing packages for tests and checks,$(BIN)/pip install --quiet --requirement requirements.txt)
	@touch $@

$(DOCS): docs/requirements.txt $(PACKAGES)
	$(call step,installing packages for the documentation,$(BIN)/pip install --quiet --constraint requirements.txt \
	    --requirement docs/requirements.txt)
	@touch $@

$(WHEEL_TOOLS): requirements-wheel.txt $(TOOLS)
	$(call step,installing packages for wheels,$(BIN)/pip install --quiet --constraint requirements.txt \
	    --requirement requirements-wheel.txt)
	@touch $@

$(OLDEST)/stamp: pyproject.toml | $(READY)
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --target $(OLDEST) "transformers==$(OLDEST_TRANSFORMERS)"
	@touch $@

$(HUB_TOOLS)/stamp: hub/requirements.txt | $(TOOLS)
	rm -rf $(HUB_TOOLS)
	$(call step,installing packages for the hub,$(BIN)/pip install --quiet --target $(HUB_TOOLS) \
	    --requirement hub/requirements.txt)
	@touch $@

$(WORKFLOW_TOOLS)/stamp: .github/requirements.txt
	rm -rf $(WORKFLOW_TOOLS)
	$(call step,installing packages for checks of workflows,$(PYTHON) -m venv $(WORKFLOW_TOOLS) && \
	    $(WORKFLOW_TOOLS)/bin/pip install --quiet --requirement $<)
	@touch $@

# `make demo` watches a small model learn; `make test` checks a change in five minutes. Both need Python and make only,
# and install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/demo-$(shell date -u +%Y%m%dT%H%M%SZ)

DEMO_PLUGINS := areal_hf areal_fsdp areal_grpo areal_finetuning areal_view
PLUGINS := $(DEMO_PLUGINS) areal_vision areal_deepspeed areal_rewards areal_trackers areal_evaluation areal_agents areal_sglang areal_vllm areal_ray areal_slurm areal_nodes areal_convert areal_sandboxes areal_tinker areal_testing
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Most tests wait as much as they compute. conftest.py keeps tests that share a fixture of their file on one worker.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
export OMP_NUM_THREADS ?= 1
# Seconds for `make test-slow`; the tests that have not started by then are skipped and counted.
# Each day of the year begins with another file.
SLOW_TESTS_S ?=

.PHONY: demo test test-all test-slow test-servers test-cluster test-nightly test-pythons lint types docs release servers others clean
demo: $(VENV)/demo
	$(BIN)/areal run --plugins grpo run_dir=$(RUN_DIR)

# The tiers. The markers are explained in pyproject.toml.
test: $(VENV)/test lint
	$(PYTEST) -m "not (slow or servers or cluster or nightly)"

test-all:
	$(MAKE) test-cluster
	$(MAKE) test-servers
	$(MAKE) test-slow

test-slow: $(VENV)/test-all types
	$(PYTEST) $(SLOW_TESTS_S:%=--time-limit % --start-at $(shell date +%-j)) -m "slow and not (servers or cluster or nightly)"

test-servers: $(VENV)/test-all servers
	$(PYTEST) -m "servers and not nightly"

test-cluster: $(VENV)/test-all
	$(PYTEST) -m "cluster and not nightly"

test-nightly: $(VENV)/test-all servers
	$(PYTEST) -m nightly

# The tests that need no torch, on each further Python of this machine.
find_python = $(shell for found in python$(1) $$HOME/.pyenv/versions/$(1)*/bin/python; do \
	$$found -c pass 2>/dev/null && echo $$found && break; done)
PYTHONS := $(strip $(foreach version,3.12 3.13,$(if $(call find_python,$(version)),$(version))))
TORCH_FREE := tests/config tests/cli --ignore=tests/cli/test_new_plugin.py tests/plugins \
	tests/checks/test_fingerprints.py tests/runtime \
	--ignore=tests/runtime/test_ending.py --ignore=tests/runtime/test_members_that_share_gpus.py

test-pythons: $(PYTHONS:%=test-python-%)
	@echo "ran on: $(if $(PYTHONS),$(PYTHONS),no further Python: neither 3.12 nor 3.13 is on this machine)"

test-python-%: constraints.txt
	$(call find_python,$*) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		msgspec numpy packaging pluggy pydantic pyyaml rich safetensors hypothesis "pytest>=8" "pytest-timeout>=2.3"
	PYTHONPATH=.:plugins/areal_testing/src .venv-$*/bin/python -m pytest -p areal_testing.pytest_plugin -p no:cacheprovider -m "not (slow or nightly)" $(TORCH_FREE)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test-all
	$(BIN)/mypy

docs: $(VENV)/test-all
	$(BIN)/python docs/reference/write_pages.py
	$(BIN)/python -m sphinx -b html -W --keep-going -n docs build/docs

# Build every distribution of HEAD in dist/, then install them as users do.
release: $(VENV)/test-all
	rm -rf dist
	$(BIN)/python release/build.py
	$(BIN)/python release/try_out.py

# True vLLM, SGLang, verifiers, OpenEnv and tinker-cookbook for the tests, each in an environment of its own below ~/.cache/areal, made once.
servers:
	$(PYTHON) tests/servers_on_cpu/make_environment.py vllm
	$(PYTHON) tests/servers_on_cpu/make_environment.py sglang
	$(PYTHON) tests/servers_on_cpu/make_environment.py verifiers
	$(PYTHON) tests/servers_on_cpu/make_environment.py openenv
	$(PYTHON) tests/servers_on_cpu/make_environment.py tinker_cookbook

# Compare losses, advantages and trainers with TRL, verl and OpenRLHF in an environment of theirs; write the docs' page.
others: $(VENV)/test-all
	`$(BIN)/python tests/servers_on_cpu/make_environment.py others` tests/others/compare.py
	$(BIN)/python docs/reference/write_pages.py

# Environments. Each stamp file installs what its targets need on top of the one before.
$(VENV)/python: constraints.txt tools/install_torch.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip hatchling editables
	$(PYTHON) tools/install_torch.py --python $(BIN)/python --constraints constraints.txt
	touch $@

$(VENV)/demo: $(VENV)/python pyproject.toml $(DEMO_PLUGINS:%=plugins/%/pyproject.toml)
	$(PIP) --no-build-isolation -e . $(DEMO_PLUGINS:%=-e plugins/%) "uvloop>=0.21"
	touch $@

$(VENV)/test: $(VENV)/demo $(PLUGINS:%=plugins/%/pyproject.toml)
	$(PIP) --no-build-isolation $(PLUGINS:%=-e plugins/%) -e "plugins/areal_fsdp[lora]" -e "plugins/areal_agents[verifiers]" \
		"hypothesis>=6.100" "pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.6" "ruff>=0.9"
	touch $@

$(VENV)/test-all: $(VENV)/test
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation -e "plugins/areal_deepspeed[deepspeed]" -e "plugins/areal_rewards[datasets,judge,math,models,reasoning-gym]" -e "plugins/areal_trackers[mlflow,prometheus,tensorboard,trackio,wandb]" -e "plugins/areal_ray[ray]" -e "plugins/areal_agents[gymnasium,mcp,textarena]" \
		"anthropic>=2" "build>=1.2" "furo>=2024.8.6" "ipykernel>=6" "mypy>=1.15" "myst-parser>=4" "nbclient>=0.10" "openai>=3" "pandas>=2" "playwright>=1.50" "pypiserver>=2" "rank-bm25>=0.2" "sphinx>=8" "twine>=6" types-PyYAML "uv>=0.9" "viztracer>=1.1"
	touch $@

clean:
	rm -rf $(VENV) runs build dist

# One command to see it learn, one to see it pass. Both make what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := areal_hf areal_vision areal_fsdp areal_deepspeed areal_grpo areal_rewards areal_trackers areal_finetuning areal_evaluation areal_view areal_agents areal_sglang areal_vllm areal_ray areal_slurm areal_convert areal_sandboxes
# torch is of the version in constraints.txt, and of the build that the index has: see docs/get-started.md.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml $(PLUGINS:%=plugins/%/pyproject.toml) constraints.txt
RUN_DIR ?= runs/demo-$(shell date -u +%Y%m%dT%H%M%SZ)

# Tests of true runs wait as much as they compute. A file stays with one worker: what its tests share is made once.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-programs test-long test-fast test-pythons lint docs release servers clean
demo: $(VENV)/demo
	$(BIN)/areal run --plugins grpo run_dir=$(RUN_DIR)

test: $(VENV)/test lint servers
	$(PYTEST) -m "not long"

# What `make test` skips where SLURM, ssh, bubblewrap or Chromium is not installed.
test-programs: $(VENV)/test
	$(PYTEST) -m "not long" plugins/areal_slurm plugins/areal_sandboxes plugins/areal_view/tests/test_page*.py tests/integration/test_command_launcher.py

test-long: $(VENV)/test servers
	$(PYTEST) -m long

test-fast: $(VENV)/test
	$(PYTEST) -m "not slow and not long"

# The quick half that needs no torch, on every further Python of this machine. PyTorch's build for CPUs is pinned for one
# Python only; another one would bring gigabytes for GPUs. `areal new-plugin` is tried with tools of .venv alone.
find_python = $(shell for found in python$(1) $$HOME/.pyenv/versions/$(1)*/bin/python; do \
	$$found -c pass 2>/dev/null && echo $$found && break; done)
PYTHONS := $(foreach version,3.12 3.13,$(if $(call find_python,$(version)),$(version)))
TORCH_FREE := tests/config tests/cli --ignore=tests/cli/test_new_plugin.py tests/plugins tests/messages tests/launchers tests/driver/test_attempts.py

test-pythons: $(PYTHONS:%=test-python-%)
	@echo "ran on: $(if $(PYTHONS),$(PYTHONS),no further Python: neither 3.12 nor 3.13 is on this machine)"

test-python-%: constraints.txt
	$(call find_python,$*) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		msgspec numpy packaging pluggy pydantic pyyaml rich safetensors hypothesis "pytest>=8" "pytest-timeout>=2.3"
	PYTHONPATH=. .venv-$*/bin/python -m pytest -p no:cacheprovider -m "not slow and not long" $(TORCH_FREE)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/test
	$(BIN)/python docs/reference/write_pages.py
	$(BIN)/python -m sphinx -b html -W --keep-going -n docs build/docs

# Every distribution of HEAD in dist/, then as users install them.
release: $(VENV)/test
	rm -rf dist
	$(BIN)/python release/build.py
	$(BIN)/python release/try_out.py

# True vLLM and SGLang for the tests, each in an environment of its own below ~/.cache/areal; made once.
servers:
	$(PYTHON) tests/servers_on_cpu/make_environment.py vllm
	$(PYTHON) tests/servers_on_cpu/make_environment.py sglang

$(VENV)/python: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip hatchling editables
	$(PIP) torch
	touch $@

$(VENV)/demo: $(VENV)/python $(SOURCES)
	$(PIP) --no-build-isolation -e . $(PLUGINS:%=-e plugins/%) "uvloop>=0.21"
	touch $@

$(VENV)/test: $(VENV)/demo
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation -e "plugins/areal_deepspeed[deepspeed]" -e "plugins/areal_rewards[datasets,judge,math,models,reasoning-gym]" -e "plugins/areal_trackers[mlflow,prometheus,tensorboard,trackio,wandb]" -e "plugins/areal_fsdp[lora]" -e "plugins/areal_ray[ray]" -e "plugins/areal_agents[gymnasium,mcp,textarena]" \
		"anthropic>=2" "build>=1.2" "furo>=2024.8.6" "hypothesis>=6.100" "ipykernel>=6" "mypy>=1.15" "myst-parser>=4" "nbclient>=0.10" "openai>=3" "pandas>=2" "playwright>=1.50" "pypiserver>=2" "pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.6" "rank-bm25>=0.2" "ruff>=0.9" "sphinx>=8" "twine>=6" types-PyYAML "uv>=0.9" "viztracer>=1.1"
	touch $@

clean:
	rm -rf $(VENV) runs build dist

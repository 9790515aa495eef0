# `make` lists the targets; ARGS="..." adds arguments. Nothing but Python 3.11 or newer, make and gcc is needed beforehand.

VENV := .venv
BIN := $(VENV)/bin
BUILD := tests/tools/build_venv.py
HERE := not gpu and not shapes and not delivery and not nightly
# Two for a CPU: a test waits for its daemons now and then.
SIDE_BY_SIDE := -n $(shell echo $$(( $$(nproc) * 2 ))) --maxprocesses 6 --dist loadfile --no-loadscope-reorder
PASSED = passed() { "$(BIN)/pytest" "$$@" $(ARGS) || [ $$? = 5 ]; }
# Debian's package, and a command of it.
TOOLS := redis-server:redis-server prometheus:prometheus openssl:openssl iproute2:ip systemd:systemd-analyze tmux:tmux chromium:chromium
# The first of these that runs and is new enough; `make venv PYTHON=/path/to/python` takes another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$python && break; done)
# Some containers set it: every daemon that a test starts would compile kvoffd anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench contest gpu servers nightly shapes routers next-vllm fuzz gpu-files dist deb image release delivery clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.engine ## build .venv: kvoffd, its tools, and vLLM with torch for CPU (4 GB, minutes)

demo: $(VENV)/.engine ## watch a real vLLM get its prompts back from kvoffd
	@$(BIN)/python -m tests.demo

# Engines run one after the other, in two rows at the same time, so that both CPUs are busy: the second has the tests that
# import vLLM, which takes 15 seconds of a CPU, and then the engines of files marked `concurrent`. These are all files with
# engines of the second model runner, for which vLLM is imported once more. Its output comes at the end.
# Before that all others run side by side. 5 is pytest's status for no test.
test: $(VENV)/.engine $(VENV)/.collected .cuda/.fetched ## run every test that needs no GPU, real engines too; ARGS="tests/cli -k top"
	@$(PASSED); failed=0; \
		passed $(SIDE_BY_SIDE) -m 'not vllm and not engine and $(HERE)' || failed=1; \
		(passed -m 'vllm and not engine and $(HERE)'; unit=$$?; passed -m 'engine and concurrent and $(HERE)' && exit $$unit) \
			>$(VENV)/vllm.log 2>&1 & others=$$!; \
		passed -m 'engine and not concurrent and $(HERE)' || failed=1; \
		wait $$others || failed=1; cat $(VENV)/vllm.log; exit $$failed

lint: $(VENV)/.tools ## ruff, mypy, plain words, one name for one class, no test that measures; needs neither torch nor vLLM
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.tools.plain_words
	$(BIN)/python -m tests.tools.wall_times
	$(BIN)/python -m tests.tools.one_name

bench: $(VENV)/.tools ## measure lookups and copies, each beside a floor (1 minute); ARGS=loop: turns of the loop (minutes)
	@$(BIN)/python -m tests.bench $(ARGS)

contest: $(VENV)/.engine .venv-contest/.built ## vLLM alone, kvoffd and LMCache by programs of others (45 minutes); ARGS="--part batch"
	@$(BIN)/python -m tests.bench.contest $(ARGS)

gpu: ## measure and try what only an NVIDIA GPU can tell (10 minutes, no internet); ARGS="--part vllm", or --double
	@$(or $(PYTHON),$(error There is no Python 3.11 to 3.14 here)) -m tests.bench.gpu.carry run $(ARGS)

# The rest: what tests ask of the machine, what takes longer, and what is delivered.

servers: ## install the servers and tools that tests start, from Debian (as root) and PyPI; CI requires all of them
	@.venv-servers/bin/python -c 'import helm_python' 2>/dev/null || $(PYTHON) $(BUILD) .venv-servers servers
	@missing=; for tool in $(TOOLS); do command -v $${tool#*:} >/dev/null || missing="$$missing $${tool%:*}"; done; \
		test -z "$$missing" || (apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 install -qy --no-install-recommends $$missing)

nightly: $(VENV)/.engine .cuda/.fetched .venv-routers/.built ## run what is too long for every change: longer tests, planted faults, chaos, seeds (hours)
	TESTS_TIMES=5 $(BIN)/pytest -m 'nightly and not gpu' $(ARGS)
	TESTS_TIMES=5 $(BIN)/pytest tests/cache tests/chaos tests/client tests/fuzz tests/pool tests/proto tests/sim \
		tests/tiering tests/tiers tests/transfer tests/vllm -m 'not engine and $(HERE)'
	TESTS_MODEL_RUNNER=v2 $(BIN)/pytest -m 'engine and not gpu' --ignore tests/demo \
		--ignore tests/vllm/test_engine_v2.py --ignore tests/vllm/test_engine_rounds.py $(ARGS)
	$(BIN)/python -m tests.sim.planted_at_the_door
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.sim.soak --seconds 1800

shapes: $(VENV)/.engine .venv-torchvision/.built ## run a real vLLM in every shape of client/README.md that CI has no time for (half an hour)
	$(BIN)/pytest -m 'shapes and not gpu' $(ARGS)

routers: $(VENV)/.engine .venv-routers/.built ## have Dynamo's indexer and vLLM's router read engines' KV events (0.4 GB)
	$(BIN)/pytest tests/routers $(ARGS)

next-vllm: $(VENV)/.engine ## run the connector's tests with the newest vLLM's Python over the CPU build's binaries
	$(BIN)/python -m tests.tools.next_vllm .venv-next $(ARGS)

fuzz: $(VENV)/.fuzz ## fuzz every decoder by coverage, half a minute each
	@$(BIN)/python -m tests.fuzz $(ARGS)

gpu-files: ## fetch and build what `make gpu` takes to a machine without internet; ARGS="--python 3.12"
	@$(PYTHON) -m tests.bench.gpu.carry fetch $(ARGS)

dist: $(VENV)/.dist ## build the sdist and a wheel for all Pythons of x86_64 and aarch64, as far as their gcc is here
	@rm -rf dist
	@$(BIN)/python deploy/build_dist.py dist

deb: $(VENV)/.tools ## build a Debian package with all that kvoffd needs, for this release of Debian or Ubuntu; PEERS=yes adds NIXL
	@rm -rf .delivery/deb
	@$(BIN)/python -m hatchling build --target wheel --directory .delivery/deb
	@$(BIN)/python -m pip download --quiet --only-binary=:all: --find-links .delivery/deb --dest .delivery/deb \
		--python-version $$(/usr/bin/python3 -c 'import platform; print(platform.python_version())') \
		"$$(echo .delivery/deb/kvoffd-*.whl)[s3]"
	@test -z "$(PEERS)" || $(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest .delivery/deb \
		--python-version $$(/usr/bin/python3 -c 'import platform; print(platform.python_version())') 'nixl-cu12>=1.5'
	@mkdir -p dist
	@deploy/debian/build_deb.sh .delivery/deb dist

image: ## build the container image with podman, buildah or docker; PEERS=yes adds NIXL; ARGS="--build-arg BASE=ubuntu:24.04"
	@PEERS=$(PEERS) deploy/docker/build_image.sh $(ARGS)

release: $(VENV)/.dist ## build and sign all of the above and the Helm chart; KEY=..., REGISTRY=..., PUBLISH=yes (deploy/RELEASE.md)
	@deploy/release.sh

delivery: $(VENV)/.dist ## install wheels and package, boot the unit, run the image (as root; minutes)
	$(BIN)/pytest -m delivery $(ARGS)

clean: ## remove all environments, caches and what was built
	rm -rf .venv* .demo .fuzz .gpu-site .cuda .delivery dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kvoffd client proto tests deploy -type d -name __pycache__ -prune -exec rm -rf {} +

# In a fresh clone pytest compiles all tests. One process does it, or each of those side by side would (11 s of a CPU).
# What keeps a file from being collected is told by the run that follows.
$(VENV)/.collected: | $(VENV)/.tools
	@$(BIN)/pytest --collect-only -qq -m 'not vllm and not engine and $(HERE)' >/dev/null || true
	@touch $@

# Editable: Python is taken from here as it is, but C must be compiled again, and the version be written down.
$(VENV)/.tools: pyproject.toml hatch_build.py kvoffd/__init__.py $(shell find kvoffd -name '*.[ch]') $(BUILD)
	@test -n "$(PYTHON)" || { echo "kvoffd needs Python 3.11 to 3.14 and found none: install one, or say" \
		"\`make PYTHON=/path/to/python\`." >&2; exit 1; }
	@$(PYTHON) $(BUILD) $(VENV) tools
	@touch $@

$(VENV)/.engine $(VENV)/.fuzz $(VENV)/.dist: $(VENV)/.%: $(BUILD) | $(VENV)/.tools
	@$(PYTHON) $(BUILD) $(VENV) $*
	@touch $@

.venv-routers/.built: $(BUILD)
	@for router in dynamo vllm-router; do $(PYTHON) $(BUILD) .venv-routers/$$router $$router || exit 1; done
	@touch $@

.venv-contest/.built: $(BUILD) | $(VENV)/.engine
	@$(BIN)/python $(BUILD) $(@D) contest
	@touch $@

# PyPI's torchvision is built for CUDA: beside a torch for CPU its operators do not load, and it is not imported where
# these two are not declared. 0.28 is that of torch 2.13.
.venv-torchvision/.built: $(VENV)/.engine
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(@D) 'torchvision==0.28.*'
	@sed -i '1i import torch\nlibrary = torch.library.Library("torchvision", "DEF")\nfor name in ("nms", "qnms"):\n    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")' $(@D)/torchvision/__init__.py
	@touch $@

# What is out of reach is said, and its tests are skipped by name; the next `make` tries again.
.cuda/.fetched: tests/kit/cuda_files.py | $(VENV)/.tools
	@if $(BIN)/python -m tests.kit.cuda_files; then touch $@; fi

# Every target sets up what it needs: a fresh Debian 12 machine and root are enough.
#
#   make demo        a real engine reuses KV across requests, processes and a daemon restart
#   make test        the whole test suite
#   make setup       only the environment, .venv; `source .venv/bin/activate` gives `kvstore`
#   make test-rdma   the tests that need RoCEv2, in virtual machines that have it
#   make test-vllm   the tests on the real vLLM, in an environment of their own, .venv-vllm
#   make lint types contracts proto-check wheel-check     what CI checks besides
#   make bench       the speed table, as ratios measured in the same run
#   make bench-pool  the same of two nodes and a Redis
#   make bench-vllm  the same of the connector in real vLLM engines, beside its peers
#   make bench-peers  the same work on this store, Mooncake, Redis, LMCache and NIXL, in turns
#   make format proto                          rewrite files in place

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
export VENV
PYTHON_ := $(VENV)/bin/python
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
PEERS_VENVS ?= .venv-peers

.PHONY: help setup demo test test-rdma test-vllm lint format types contracts proto proto-check wheel-check bench bench-pool bench-rdma bench-vllm bench-peers clean

help:
	@sed -n '3,14s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

setup: $(READY)

$(READY): pyproject.toml requirements/constraints.txt scripts/setup
	@scripts/setup $(VENV)
	@touch $@

$(VLLM_READY): pyproject.toml requirements/vllm.txt scripts/setup-vllm
	@scripts/setup-vllm $(VLLM_VENV)
	@touch $@

demo: $(READY)
	$(PYTHON_) -m examples.demo $(DEMO)

# RUNLEVEL: Debian's package shall not start a server of its own.
test: $(READY)
	@lacks=(); \
	command -v redis-server >/dev/null || lacks+=(redis-server); \
	command -v ip >/dev/null || lacks+=(iproute2); \
	compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || lacks+=(libfaketime); \
	[ $${#lacks[@]} -eq 0 ] || RUNLEVEL=1 scripts/apt-install "$${lacks[@]}" || \
	echo "test: not installed: $${lacks[*]}: what needs them is skipped"
	$(PYTHON_) -m pytest -n 2 --dist worksteal -rs $(TESTS)

test-rdma: $(READY)
	$(PYTHON_) -m tests.rdma.guest.suite $(TESTS)

# One after the other: each engine takes both cores.
test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest -ra $(or $(TESTS),tests/engines)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(READY)
	$(PYTHON_) -m mypy

contracts: $(READY)
	$(VENV)/bin/lint-imports

proto: $(READY)
	scripts/proto

proto-check: $(READY)
	scripts/proto --check

wheel-check: $(READY)
	scripts/check-wheel

bench: $(READY)
	@command -v fio >/dev/null || { [ "$$(id -u)" -eq 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends fio; } || echo "bench: no fio: the SSD row will say so"
	$(PYTHON_) -m benchmarks $(BENCH)

bench-pool: $(READY)
	@command -v redis-server >/dev/null || RUNLEVEL=1 scripts/apt-install redis-server
	$(PYTHON_) -m benchmarks --only pool --markdown $(BENCH)

# The figures of one kind of emulated machine: only their ratios mean anything.
bench-rdma: $(READY)
	scripts/rdma-guest --timeout 900 --results benchmarks/results -- bash -c 'python -m benchmarks --only rdma --json "$$RDMA_GUEST_RESULTS/rdma.json" $(BENCH)'

# Engines run in vLLM's environment; what measures them runs in ours. Twenty minutes.
bench-vllm: $(READY) $(VLLM_READY)
	@scripts/setup-vllm-peers $(VLLM_VENV)
	$(PYTHON_) -m benchmarks.vllm --vllm $(VLLM_VENV) $(BENCH)

# Every store in its own environment. About 25 minutes; each row is written when it is complete.
bench-peers: $(READY)
	@lacks=(); \
	command -v redis-server >/dev/null || lacks+=(redis-server); \
	command -v fio >/dev/null || lacks+=(fio); \
	[ $${#lacks[@]} -eq 0 ] || RUNLEVEL=1 scripts/apt-install "$${lacks[@]}" || \
	echo "bench-peers: not installed: $${lacks[*]}: the rows will say so"
	@scripts/setup-peers $(PEERS_VENVS)
	$(PYTHON_) -m benchmarks.peers --environments $(PEERS_VENVS) $(BENCH)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .guest

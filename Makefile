# As root on Debian or Ubuntu, each target installs what it lacks (scripts/setup.sh).

PROFILE ?= dev
BIN_DIR := $(or $(CARGO_TARGET_DIR),target)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
export BIN_DIR
# Where rustup puts cargo, which setup.sh may just have installed, and setup.sh kustomize.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH):$(abspath $(BIN_DIR)/../kustomize/usr/bin)

.DEFAULT_GOAL := help
.PHONY: help setup build demo run test unit test-kernel test-matrix fresh lint audit bench clean

help: ## Show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Install what building and testing need
	@scripts/setup.sh

build: setup ## Build both agents and uringctl
	cargo build --profile $(PROFILE) --bins

# BACKEND=nbd or rbd; where this kernel lacks the driver, on the test kernel.
demo: build ## Take volumes through their whole life on this machine
	@scripts/demo.sh

run: build ## Run both agents with a fresh pool until ^C
	@scripts/run.sh

test: lint unit test-kernel ## Check and test everything, on this kernel and another

# Tests mount and attach loop devices: root. One failure hides no other.
unit: setup
	@failed=0; export NOT_TESTED=$$(mktemp); \
	if cargo nextest --version >/dev/null 2>&1; then \
	  set -x; cargo nextest run --no-fail-fast || failed=1; \
	  cargo test --doc || failed=1; \
	else \
	  set -x; cargo test --no-fail-fast || failed=1; \
	fi; \
	{ set +x; } 2>/dev/null; \
	sort -u $$NOT_TESTED | sed 's/^/**** NOT TESTED on this kernel: /' >&2; \
	rm -f $$NOT_TESTED; exit $$failed

# ONLY=nbd or another backend, module or story; HOST_KERNEL=1: this machine's own
# kernel, with nbd and rbd; TEST_KERNEL=required: fail where it cannot run.
test-kernel: setup ## Test on a kernel with nbd, rbd, udevd (tests/kernel/run.sh)
	@tests/kernel/run.sh
export ONLY QUICK BACKEND HOST_KERNEL TEST_KERNEL KERNELS

# ONLY=faults and so on, as above; KERNELS="sid trixie": those of these Debian suites.
test-matrix: setup ## Test on several kernels, with every file system: takes hours
	@tests/kernel/matrix.sh

# SUITE=bookworm or trixie: one of them.
fresh: ## Run the README's commands where nothing is installed yet
	@scripts/fresh.sh $(SUITE)

lint: build ## Formatting, clippy in every feature set, manifests, dependencies
	@scripts/setup.sh lint
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --no-default-features --features controller -- -D warnings
	cargo clippy --no-default-features --features node,cli -- -D warnings
	cargo clippy --no-default-features --features cli -- -D warnings
	cargo clippy --no-default-features --features holder -- -D warnings
	@if command -v kubectl || command -v kustomize; then scripts/check_deploy.py; \
	else echo "**** NOT TESTED: deploy, neither kubectl nor kustomize is to be had"; \
	[ -z "$$CI" ] || ! grep -qx ID=debian /etc/os-release; fi
	@if command -v dpkg-query >/dev/null; then scripts/check_programs.py; \
	else echo "programs: not checked, this is no Debian"; fi
	scripts/check_promises.sh
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check bans licenses sources; \
	else echo "dependencies: not checked, cargo-deny is not installed"; fi

audit: ## Look for advisories against dependencies (needs the network and cargo-deny)
	cargo deny check advisories

# ONLY=nbd: one backend; QUICK=1: only to see that it runs.
bench: setup ## Measure (PERFORMANCE.md says what)
	@scripts/bench.sh

clean: ## Remove what was built
	cargo clean

# As root on Debian or Ubuntu, each target installs its missing packages
# (scripts/setup.sh).

# The demos take what is built, or else the quickest build.
ifeq ($(filter-out demo run,$(or $(MAKECMDGOALS),help)),)
ifeq ($(wildcard $(or $(CARGO_TARGET_DIR),target)/debug/uringctl),)
PROFILE ?= demo
endif
endif
PROFILE ?= dev
BIN_DIR := $(or $(CARGO_TARGET_DIR),target)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
export BIN_DIR
# rustup's cargo, which setup.sh may just have installed, and setup.sh's cargo-cyclonedx,
# kustomize, OpenBao, prometheus and PyKMIP.
TARGET := $(abspath $(BIN_DIR)/..)
UNPACKED := $(TARGET)/cyclonedx/bin:$(TARGET)/kustomize/usr/bin:$(TARGET)/openbao:$(TARGET)/prometheus/usr/bin:$(TARGET)/pykmip
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH):$(UNPACKED)

# setup.sh's, with the packages of scripts/requirements.txt.
PYTHON := $(BIN_DIR)/../python

.DEFAULT_GOAL := help
.PHONY: help setup build demo run test unit test-kernel test-matrix fresh lint monitoring traces pictures book audit bench counts profile sizes deb check-deb images sbom clean

help: ## Show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Install what the build, the tests and the demos need
	@scripts/setup.sh

build: ## Build the agents, the supervisor and uringctl
	@scripts/setup.sh build
	cargo build --profile $(PROFILE) --bins

# BACKEND=nbd, rbd or nfs; on the test kernel if this kernel lacks the driver.
# BACKEND=manager: volumes that files ask for, of three backends. FAULTS=1: a disk that hangs,
# a volume in use, a killed agent, foreign data, with image files on this kernel.
demo: ## Show the whole life of volumes on this machine; FAULTS=1: with failures
	@$(first_time)
	@scripts/setup.sh demo
	cargo build --profile $(PROFILE) $(AGENTS)
	@scripts/demo$(if $(FAULTS),_faults,$(if $(filter manager,$(BACKEND)),_manager)).sh

run: ## Run both agents with a fresh pool until ^C
	@$(first_time)
	@scripts/setup.sh run
	cargo build --profile $(PROFILE) $(AGENTS)
	@scripts/run.sh

# Neither runs the supervisor.
AGENTS := --bin uring-csi-node --bin uring-csi-controller --bin uringctl
first_time = [ -x $(BIN_DIR)/uringctl ] || \
	echo "$@: installs packages where some are missing, then builds: some minutes the first time"

# In their order: the last takes what `unit` left.
.NOTPARALLEL:
test: lint monitoring unit test-kernel ## Check and test everything, on this kernel and another

# Root, because tests mount and attach loop devices. A failure does not stop the rest. The
# tests that this kernel did not pass in full are left for test-kernel, if none failed.
unit: setup
	@failed=0; rm -f $(LEFT_FOR_KERNEL); export NOT_TESTED=$$(mktemp); \
	if cargo nextest --version >/dev/null 2>&1; then \
	  set -x; cargo nextest run --no-fail-fast || failed=1; \
	  cargo test --doc || failed=1; \
	else \
	  set -x; cargo test --no-fail-fast || failed=1; \
	fi; \
	{ set +x; } 2>/dev/null; \
	cut -f2 $$NOT_TESTED | sort -u | sed 's/^/**** NOT TESTED on this kernel: /' >&2; \
	[ $$failed = 1 ] || cut -f1 $$NOT_TESTED | sort -u >$(LEFT_FOR_KERNEL); \
	rm -f $$NOT_TESTED; exit $$failed

# ONLY=nbd or another backend, module or story; HOST_KERNEL=1: this machine's kernel,
# with nbd and rbd; TEST_KERNEL=required: fail if the test kernel cannot run.
# After `unit` in `make test`: only what that left.
test-kernel: setup ## Test on a kernel with nbd, rbd, udevd (tests/kernel/run.sh)
	@$(if $(filter test,$(MAKECMDGOALS)),LEFT_FOR_KERNEL=$(LEFT_FOR_KERNEL)) tests/kernel/run.sh
LEFT_FOR_KERNEL := $(TARGET)/left-for-kernel
export ONLY QUICK BACKEND HOST_KERNEL TEST_KERNEL

# ONLY=faults and so on, as above; KERNELS="sid trixie": the kernels of these Debian
# suites; SUITES="sid": the Ceph of these; SUITES="": only this machine's.
test-matrix: setup ## Test on several kernels and releases of Ceph: takes hours
	@scripts/setup.sh roots
	@tests/kernel/matrix.sh

# SUITE=bookworm or trixie: only this one; ONLY=demo: only the demos, ONLY=unit or another
# target: this instead of `test`.
fresh: ## Run the commands of docs/start.md on a minimal Debian
	@scripts/setup.sh roots
	@scripts/fresh.sh $(SUITE)

lint: build ## Formatting, clippy in every feature set, manifests, dependencies
	@scripts/setup.sh lint
	cargo fmt --check
	cargo clippy --all-targets --all-features -- -D warnings
	cargo clippy --no-default-features --features controller -- -D warnings
	cargo clippy --no-default-features --features node,cli -- -D warnings
	cargo clippy --no-default-features --features cli -- -D warnings
	cargo clippy --no-default-features --features holder -- -D warnings
	@if [ -e $(PYTHON)/installed ] && { command -v kubectl || command -v kustomize; }; \
	then $(PYTHON)/bin/python scripts/check_deploy.py && $(PYTHON)/bin/python scripts/check_chart.py; \
	else echo "**** NOT TESTED: deploy, kubectl or kustomize, or packages of Python, are missing"; \
	[ -z "$$CI" ] || ! grep -qx ID=debian /etc/os-release; fi
	@if [ -e $(PYTHON)/installed ]; \
	then $(PYTHON)/bin/python scripts/reference.py --check && $(PYTHON)/bin/python scripts/book.py; \
	else echo "**** NOT TESTED: docs, packages of Python are missing"; \
	[ -z "$$CI" ] || ! grep -qx ID=debian /etc/os-release; fi
	@if command -v dpkg-query >/dev/null; then scripts/check_programs.py; \
	else echo "programs: not checked, this is not Debian"; fi
	@$(check_monitoring)
	scripts/check_promises.sh
	scripts/check_modules.py
	scripts/performance.py --check
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check bans licenses sources; \
	else echo "dependencies: not checked, cargo-deny is not installed"; fi

# Also writes what docs/ takes from the code.
book: build ## Build docs/ as a book, in target/book/docs
	@scripts/setup.sh lint
	$(PYTHON)/bin/python scripts/reference.py
	$(PYTHON)/bin/python scripts/book.py

monitoring: build ## Run the rules' and the dashboard's queries against a Prometheus
	@scripts/setup.sh lint
	@$(check_monitoring) --live

# The agents of another build: the next one replaces them.
traces: setup ## Check the export of traces, of agents with the feature otel
	@scripts/setup.sh lint
	cargo build --profile $(PROFILE) --features otel $(AGENTS)
	$(PYTHON)/bin/pip install -q opentelemetry-proto==1.45.2
	$(PYTHON)/bin/python scripts/check_traces.py

pictures: build ## Draw the dashboard for docs/, from a run of the agents
	@scripts/setup.sh lint
	$(PYTHON)/bin/pip install -q matplotlib==3.11.2
	$(PYTHON)/bin/python scripts/draw_dashboard.py

check_monitoring = { [ -e $(PYTHON)/installed ] && command -v promtool && command -v prometheus && \
	  { command -v kubectl || command -v kustomize; }; } >/dev/null || { \
	  echo "**** NOT TESTED: alerting rules and dashboard, tools or packages of Python are missing"; \
	  [ -z "$$CI" ] || ! grep -qx ID=debian /etc/os-release; exit; }; \
	$(PYTHON)/bin/python scripts/check_monitoring.py

audit: ## Look for advisories against dependencies (needs the network and cargo-deny)
	cargo deny check advisories

# ONLY=nbd: one backend; QUICK=1: a short run, with fewer rounds and no p99; FAULTS=0: without
# volumes that hang; UPDATE=1: copy the numbers into PERFORMANCE.md.
bench: setup ## Measure the cases of PERFORMANCE.md
	@scripts/bench.sh

# UPDATE=1 writes the counts to the file; NAMES=1 lists the system calls by name;
# VOLUMES=1000: beside so many other volumes, instead of 100.
counts: setup build ## Compare the agent's system calls with bench/counts/counts.txt
	cargo bench --profile dev --bench counts
export UPDATE NAMES VOLUMES

# CALLERS=4: so many at once; SECONDS_LONG=30.
profile: setup ## Draw docs/pictures/profile.svg, where the agent's time on the CPU goes
	cargo build --release $(AGENTS)
	@scripts/profile.sh
export CALLERS SECONDS_LONG

sizes: ## Build what the images carry, and compare its sizes with scripts/sizes.txt
	@scripts/setup.sh build
	nice scripts/sizes.sh

# ARCH="amd64 arm64": for these architectures; QUICK=1: of the programs of `make build`, and only
# run.
images: $(if $(QUICK),build) ## Build the images without a registry, run them, print their sizes
	@scripts/setup.sh $(if $(QUICK),containers,images)
	nice scripts/images.sh $(ARCH)

deb: ## Build the Debian package (needs cargo-deb, cargo-cyclonedx): docs/systemd.md
	@scripts/setup.sh build
	nice scripts/deb.sh

# DEB=FILE: another one than that of make deb.
check-deb: ## Install the Debian package where systemd runs, and use it
	@scripts/setup.sh containers
	scripts/deb_check.sh $(DEB)

sbom: ## List the crates of the programs as CycloneDX (needs cargo-cyclonedx)
	scripts/sbom.sh $(BIN_DIR)/../uring-csi.cdx.json

clean: ## Remove build results
	cargo clean

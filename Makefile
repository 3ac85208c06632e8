# A thin front for CMake's presets. `make help` lists what there is.

RANKS ?= 2
EPOCHS ?= 4
JOBS ?= $(shell nproc)
TEST_OPTIONS ?=
HOURS ?= 2
BUILD := build

.PHONY: all help setup build train test test-thorough test-nightly soak bench docs format lint clean

all: build

help:
	@echo "make train [RANKS=2] [EPOCHS=4]  train a small network on Fashion-MNIST"
	@echo "make build                       the release build: the library, the commands and all examples, in build/bin, in minutes"
	@echo "make test                        builds and runs every test, in minutes"
	@echo "make test-thorough               the long counts after it: kills, fuzzers, PyTorch's own suite, the benches"
	@echo "make test-nightly                all with the longest counts, and under sanitizers"
	@echo "make soak [HOURS=2]              trainings with a fault a minute; writes its table into tests/faultbox/README.md"
	@echo "make bench                       what is measured, as in the README"
	@echo "make docs                        the documents as a site, in build/docs/html; it needs no network"
	@echo "make format, make lint           clang-format; clang-tidy, thread safety and the structure checks"
	@echo "make clean                       remove the build folder"
	@echo "Each installs what is missing first (scripts/setup says what that is)."

setup:
	@scripts/setup

# Configured again only when something asks for it: CMake's own rules notice changed lists of files.
$(BUILD)/build.ninja: | setup
	@mkdir -p $(BUILD) && cmake --preset release > $(BUILD)/configure.log 2>&1 || { cat $(BUILD)/configure.log; exit 1; }

build: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) --target lockstep lockstep_c lockstep_cli lockstep_tour lockstep_doctor_probe examples -j $(JOBS)

train: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) --target lockstep_cli train_fashion_mnist -j $(JOBS)
	@$(BUILD)/bin/lockstep run -n $(RANKS) --run-dir runs/fashion_mnist -- \
	  $(BUILD)/bin/train_fashion_mnist --epochs $(EPOCHS) --json runs/fashion_mnist/figures.json
	@echo "what happened, as a page: $$($(BUILD)/bin/lockstep report runs/fashion_mnist)"

# What only tests use is installed while they compile. An MPI that came with it is compiled against afterwards.
test: setup $(BUILD)/build.ninja
	@scripts/setup --tests & installing=$$!; cmake --build $(BUILD) --target all -j $(JOBS); built=$$?; \
	  wait $$installing && exit $$built
	@! grep -qs '^LOCKSTEP_MPICXX_.*-NOTFOUND' $(BUILD)/CMakeCache.txt || \
	  { cmake --preset release > $(BUILD)/configure.log && cmake --build $(BUILD) --target all -j $(JOBS); }
	@scripts/test $(TEST_OPTIONS)

# Configured once more, for clang may just have come.
thorough_build = scripts/setup --thorough && cmake --preset release > $(BUILD)/configure.log && \
  cmake --build $(BUILD) --target all benches fuzzers -j $(JOBS)

test-thorough: setup $(BUILD)/build.ninja
	@$(thorough_build)
	@scripts/test --thorough $(TEST_OPTIONS)

soak: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) --target lockstep_cli train_fashion_mnist -j $(JOBS)
	@scripts/soak --hours $(HOURS) --table tests/faultbox/README.md

test-nightly: setup $(BUILD)/build.ninja
	@$(thorough_build)
	@scripts/test --nightly
	@scripts/sanitize thread && scripts/sanitize address

bench: build
	@scripts/bench

docs: setup $(BUILD)/build.ninja
	@scripts/setup --docs
	@cmake --build $(BUILD) --target lockstep_cli -j $(JOBS) > $(BUILD)/docs.log || { cat $(BUILD)/docs.log; exit 1; }
	@scripts/docs

format: setup
	@scripts/format

lint: setup $(BUILD)/build.ninja
	@scripts/lint

clean:
	@rm -rf $(BUILD)

# A thin front for CMake's presets. `make help` lists what there is.

RANKS ?= 2
EPOCHS ?= 4
JOBS ?= $(shell nproc)
BUILD := build

.PHONY: all help setup build train test test-thorough test-nightly bench format lint clean

all: build

help:
	@echo "make train [RANKS=2] [EPOCHS=4]  train a small network on Fashion-MNIST"
	@echo "make build                       the release build, in build/bin"
	@echo "make test                        builds and runs every test, in minutes"
	@echo "make test-thorough               the long counts after it: kills, fuzzers, PyTorch's own suite, the benches"
	@echo "make test-nightly                all with the longest counts, and under sanitizers"
	@echo "make bench                       what is measured, as in the README"
	@echo "make format, make lint           clang-format, clang-tidy and the structure checks"
	@echo "make clean                       remove the build folder"
	@echo "Each installs what is missing first (scripts/setup says what that is)."

setup:
	@scripts/setup

# Configured again only when something asks for it: CMake's own rules notice changed lists of files.
$(BUILD)/build.ninja: | setup
	@mkdir -p $(BUILD) && cmake --preset release > $(BUILD)/configure.log 2>&1 || { cat $(BUILD)/configure.log; exit 1; }

build: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) --target lockstep lockstep_cli lockstep_doctor_probe examples benches -j $(JOBS)

train: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) --target lockstep_cli train_fashion_mnist -j $(JOBS)
	@$(BUILD)/bin/lockstep run -n $(RANKS) --run-dir runs/fashion_mnist -- \
	  $(BUILD)/bin/train_fashion_mnist --epochs $(EPOCHS) --json runs/fashion_mnist/figures.json
	@echo "what happened, as a page: $$($(BUILD)/bin/lockstep report runs/fashion_mnist)"

# What only tests use is installed while they compile.
test: setup $(BUILD)/build.ninja
	@scripts/setup --tests & installing=$$!; cmake --build $(BUILD) --target all -j $(JOBS); built=$$?; \
	  wait $$installing && exit $$built
	@scripts/test

# Configured once more, for clang may just have come.
thorough_build = scripts/setup --thorough && cmake --preset release > $(BUILD)/configure.log && \
  cmake --build $(BUILD) --target all benches fuzzers -j $(JOBS)

test-thorough: setup $(BUILD)/build.ninja
	@$(thorough_build)
	@scripts/test --thorough

test-nightly: setup $(BUILD)/build.ninja
	@$(thorough_build)
	@scripts/test --nightly
	@scripts/sanitize thread && scripts/sanitize address

bench: build
	@mkdir -p runs/bench
	@python3 bench/launch/bench_launch.py --json runs/bench/launch.json
	@python3 bench/python_all_reduce/bench_python_all_reduce.py --json runs/bench/python_all_reduce.json
	@$(BUILD)/bin/bench_checkpoint --json runs/bench/checkpoint.json
	@$(BUILD)/bin/bench_metrics --json runs/bench/metrics.json
	@$(BUILD)/bin/bench_transforms --json runs/bench/transforms.json
	@$(BUILD)/bin/lockstep run -n 2 -- $(BUILD)/bin/bench_run_log --json runs/bench/run_log.json
	@$(BUILD)/bin/lockstep run -n 2 -- $(BUILD)/bin/bench_sync_batch_norm --json runs/bench/sync_batch_norm.json
	@LOCKSTEP_BUILD_DIR=$(BUILD) bench/all_reduce/peers.sh
	@for ranks in 2 4; do file=runs/bench/all_reduce_$$ranks; \
	  $(BUILD)/bin/bench_all_reduce --ranks $$ranks --json $$file.json && \
	  python3 bench/all_reduce/plot.py $$file.json $$file.svg && \
	  python3 bench/all_reduce/report.py $$file.json || exit 1; done
	@$$(python3 -c 'import sys; sys.path.insert(0, "bench"); import support; print(support.python_with_torch() or "true")') \
	  tests/python/package.py >/dev/null || true
	@$(BUILD)/bin/bench_step --ranks 2 --json runs/bench/step.json && \
	  python3 bench/step/plot.py runs/bench/step.json runs/bench/step.svg && \
	  python3 bench/step/report.py runs/bench/step.json

format: setup
	@scripts/format

lint: setup $(BUILD)/build.ninja
	@scripts/lint

clean:
	@rm -rf $(BUILD)

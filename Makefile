# One front door. Every target is one line; the work is in scripts/.
PYTHON ?= python3
TORCH ?= torch==2.13.0
export PYTHON TORCH

.DEFAULT_GOAL := help
.PHONY: help setup dev test smoke test-full sweep lint format cuda-compile portable docs bench bench-cpu bench-regression wheels demo clients

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20
setup: ## make .venv with an exact torch, glm5sdk and the CPU backend (editable); does nothing when nothing changed
	@scripts/setup.sh
dev: ## setup, and what tests and linters need
	@scripts/setup.sh dev
test: dev ## what every change must pass (15 minutes)
	@scripts/test.sh merge
smoke: dev ## a first answer (20 seconds)
	@scripts/test.sh smoke
test-full: dev ## every variant, 100 examples a case (40 minutes)
	@scripts/test.sh full
sweep: dev ## everything, soak and fuzz too (hours)
	@scripts/test.sh sweep
lint: dev ## style, types, import contracts, spelling, sizes
	@scripts/lint.sh
format: dev ## let ruff and clang-format mend what they can
	@scripts/lint.sh --fix
clients: dev ## lm-eval, guidellm and litellm against `glm5 serve` (10 minutes, and 2 GB the first time)
	@scripts/clients.sh
cuda-compile: ## compile every CUDA kernel for every architecture with nvcc; red when one spills (needs no GPU)
	@scripts/cuda_compile.sh $(ARCHS)
portable: dev ## kernels on emulated older processors and on AArch64
	@scripts/portable.sh
docs: dev ## write docs/ops.md and docs/support.md from the registry
	@.venv/bin/python scripts/write_docs.py
bench: dev ## time every op on this machine
	@scripts/bench.sh
bench-cpu: dev ## the ops that decide the speed, against torch and the roofline (10 minutes; ARGS="--only linear")
	@.venv/bin/python benchmarks/cpu_ops.py $(ARGS)
bench-regression: dev ## speed relative to torch against the stored ratios; red when one has fallen
	@.venv/bin/python -m pytest benchmarks/bench_regression.py $(ARGS)
wheels: dev ## build the wheels into dist/
	@scripts/wheels.sh
demo: ## train a tiny GLM-5 on real text, save it, load it, let it write
	@scripts/demo.sh

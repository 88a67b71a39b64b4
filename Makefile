# One line each; `make help` prints this file's own words.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
ARGS ?=
TASKS ?=
PORT ?= 5000
export MLFLOW_DISABLE_TELEMETRY = true
# What runs jobs for others costs 13 processes and 2.6 GB, and nothing here asks for it.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION = false

.DEFAULT_GOAL := help
.PHONY: help $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(MAKEFILE_LIST))

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-19s %s\n", $$1, $$2}'
	@echo '  ARGS="env=pong seed=2" adds overrides to train and sweep'

setup: $(VENV)/.installed ## Create .venv and install (all other targets do it themselves)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

train: setup ## Train PPO on CartPole-v1 with EnvPool
	$(PY) -m rl_pipeline.train experiment=cartpole_ppo $(ARGS)

test: setup ## Run the default tests (under 4 minutes on 2 cores)
	$(PY) -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: setup ## Run the tests that take longer
	$(PY) -m pytest -n 2 -m slow $(ARGS)

test-all: setup
	$(PY) -m pytest -n 2 $(ARGS)

setup-cluster: setup ## Add Ray and Hydra's Ray launcher
	$(PY) -m pip install -q -c constraints.txt -e '.[cluster]'
	$(PY) -m pip install -q --no-deps 'hydra-ray-launcher==1.2.2'

setup-sweep: setup ## Add Optuna and Hydra's sweeper for it
	$(PY) -m pip install -q -c constraints.txt -e '.[sweep]'

ui: setup ## Open the MLflow UI on http://127.0.0.1:5000 (PORT=)
	$(VENV)/bin/mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port $(PORT) \
	    --workers 1

doctor: setup ## Mend what killed runs left behind (ARGS="fix=false" only tells)
	$(PY) -m rl_pipeline.doctor $(ARGS)

precision-compile: setup ## What precision and compilation give (30 minutes; QUICK=1: 2)
	$(PY) -m experiments.precision_compile.updates
	$(PY) -m experiments.precision_compile.study $(ARGS)

gpu-check: setup ## Every learner x precision x compile mode on the GPU, on stand-ins without one
	$(PY) -m pytest -q tests/gpu_check.py $(ARGS)

server: setup ## Start an MLflow server (sqlite, loopback) that many machines or jobs write to
	$(VENV)/bin/mlflow server --backend-store-uri sqlite:///mlflow-server.db \
	    --artifacts-destination ./mlartifacts-server --host 127.0.0.1 --port $(PORT) --workers 1

try-postgres: setup ## Sweep and compare on a PostgreSQL store: PG=postgresql://user:password@host/db
	$(PY) -m pip install -q -c constraints.txt -e '.[postgres]'
	MLFLOW_TRACKING_URI='$(PG)' $(PY) -m rl_pipeline.train -m tracking=server seed=1,2,3 \
	    hydra.launcher.n_jobs=2 debug=short total_steps=2000 study.name=postgres
	MLFLOW_TRACKING_URI='$(PG)' $(PY) -m rl_pipeline.compare study=postgres

sweep: setup ## Compare backends on CartPole: a small sweep that ends in a table
	$(PY) -m rl_pipeline.train sweep=backends $(ARGS)

learn: setup ## Prove that PPO and DQN learn (hours; skips what has a result; ARGS="cartpole")
	$(PY) -m experiments.learning.study $(ARGS)

stability: setup ## Prove that the default recipe ends well: 80 runs (30 minutes; QUICK=1: 1)
	$(PY) -m experiments.stability.study

parity: setup ## Prove that the backends are the same task (TASKS="cartpole pong"; 6 minutes)
	$(PY) -m experiments.parity.study $(TASKS)

try-ends: setup ## Prove that runs end well: 200 kills, 100 bad inputs (50 minutes; QUICK=1: 5)
	$(PY) -m experiments.ends.study

bench: setup ## Against Stable-Baselines3, SBX and TorchRL (55 minutes; QUICK=1: 5)
	experiments/bench/peers/install.sh $(PYTHON)
	$(PY) -m experiments.bench.study $(ARGS)

bench-start: setup ## From command to result on CartPole: what compile=auto costs (8 minutes)
	$(PY) -m experiments.bench.start $(ARGS)

bench-learning: setup ## Learning at equal steps, against Stable-Baselines3 (25 minutes)
	experiments/bench/peers/install.sh $(PYTHON)
	$(PY) -m experiments.bench.learning $(ARGS)

perf-gate: setup ## Is this checkout slower than another commit? BASE=<commit> (6 minutes)
	$(PY) -m experiments.perf_gate.study base=$(BASE) $(ARGS)

bench-envs: setup ## Environments alone: steps/s by backend, and what adapters cost (25 minutes; QUICK=1: 3)
	$(PY) -m experiments.envs.bench $(ARGS)

repro-vectorization: setup ## What stepping many environments at once is worth (12 minutes; QUICK=1: 2)
	$(PY) -m experiments.vectorization.study $(ARGS)

bench-buffers: setup ## Compare replay buffers with others' (4 minutes; QUICK=1: under 3)
	$(PY) -m pip install -q -c constraints.txt -e '.[dev,bench]'
	$(PY) -m experiments.buffers.bench

repro-backends: setup ## Study: which backend trains CartPole fastest (12 minutes; QUICK=1: 2)
	$(PY) -m experiments.backends.study

repro-replay: setup ## Study: what the choice of replay buffer costs a DQN (14 minutes; QUICK=1: 3)
	$(PY) -m experiments.replay.study

reproduce: setup ## Run the studies of README's table (75 minutes; QUICK=1: under 3 each)
	$(MAKE) --no-print-directory repro-backends
	$(MAKE) --no-print-directory repro-replay
	$(MAKE) --no-print-directory precision-compile
	$(MAKE) --no-print-directory repro-vectorization bench-buffers SEEDS= STEPS= DEVICE= # train nothing

lint: setup ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## Mend style
	$(VENV)/bin/ruff check --fix -q .
	$(VENV)/bin/ruff format -q .

clean: ## Remove the virtual environment and caches; runs and stores stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist

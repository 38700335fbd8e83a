# Every target makes .venv by itself when it is missing or out of date; no environment need be activated.
PY := .venv/bin/python
ARGS ?= --overwrite
MINUTES ?= 10
# Hundreds of processes of the tests import the package: they do not compile it each time, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: mutants raises train setup-demo test test-slow test-long fuzz test-gpu test-oldest check lint type docs bench clean setup setup-all setup-petastorm setup-peers setup-oldest setup-horovod

setup:
	@./conf/setup_env.sh

setup-petastorm: setup ## Petastorm in .venv-petastorm; says so where that cannot be, and what needs it is left out
	@./conf/setup_env.sh petastorm || true

setup-peers: setup ## other loaders, and mpi4py, in .venv-peers, for `make bench`; says so where that cannot be, and they are left out
	@./conf/setup_env.sh peers || true

setup-oldest: setup ## the oldest versions of setup.cfg, in .venv-oldest
	@./conf/setup_env.sh oldest

setup-horovod: setup ## Horovod in .venv; says so where it cannot be built, and what needs it is left out
	@./conf/setup_env.sh horovod || true

setup-demo: ## the package with what it needs and what draws, in .venv; other targets add what they need
	@./conf/setup_env.sh demo

train: setup-demo ## train on the digits; `make train ARGS=--resume` goes on from the last checkpoint
	@$(PY) -m spark_dl train --config conf/train/digits.yaml --master 'local[2]' --run_dir runs/digits $(ARGS)

.data/flights.csv.zip: | setup
	@$(PY) -c "import pathlib, examples.flights; examples.flights.download(pathlib.Path('$@'))" || echo "no flights: their tests are skipped"

setup-all: setup
	@$(MAKE) --no-print-directory --jobs=2 setup-petastorm setup-horovod

.venv/spark.jsa: .venv/.made-from ## Spark's classes as one file, so that the JVMs of the tests start faster
	@$(PY) -m tests.spark.class_archive 2>/dev/null || echo "no archive of Spark's classes: tests start more slowly"

.venv/.made-from: setup

test: setup-all .venv/spark.jsa lint type ## lint, types, and the tests that this machine can run, but for those that are slow
	@CUDA_VISIBLE_DEVICES= $(PY) -m pytest --numprocesses=3 --no-loadscope-reorder -m 'not slow and not long'

test-slow: setup-all .venv/spark.jsa ## slow tests: whole jobs, kills, clusters, networks, memory
	@CUDA_VISIBLE_DEVICES= $(PY) -m pytest --numprocesses=3 --no-loadscope-reorder -m 'slow and not long'

test-long: setup-all .venv/spark.jsa .data/flights.csv.zip ## tests that take minutes, and those that repeat others with other numbers or on another cluster; before a release
	@CUDA_VISIBLE_DEVICES= $(PY) -m pytest --numprocesses=3 --no-loadscope-reorder -m long

fuzz: setup ## random tables, states, settings and damage, for `make fuzz MINUTES=10`; what falls is kept as a test
	@CUDA_VISIBLE_DEVICES= $(PY) -m tests.fuzz --minutes $(MINUTES)

test-gpu: setup .venv/spark.jsa ## all tests that need a GPU; `make test-gpu DEVICE=cpu` runs them on the CPU in its place
	@SPARK_DL_TEST_DEVICE=$(DEVICE) $(PY) -m pytest tests/gpu

test-oldest: setup-oldest ## unit tests and tests of local Spark on the oldest versions that setup.cfg allows, in .venv-oldest
	@PYTHONPATH=$(CURDIR) .venv-oldest/bin/python -m pytest --numprocesses=3 --no-loadscope-reorder -m 'not slow and not long' -k 'not connect and not cluster and not s3' \
		--ignore tests/spark/test_jobs.py --ignore tests/spark/test_strategies.py tests/unit tests/spark

check: setup ## lint, types, and the unit tests of what changed since HEAD (or since BASE=main), in a minute
	@$(MAKE) --no-print-directory lint type
	@$(PY) conf/changed_tests.py $(BASE) | xargs --no-run-if-empty $(PY) -m pytest -q --numprocesses=2

mutants: setup-all ## changes one place at a time, and lists what no test notices: `make mutants ROOM=data/columns N=30 SEED=1 SUITE=tests/unit`
	@$(PY) -m tests.mutants '$(ROOM)' --count $(or $(N),30) --seed $(or $(SEED),0) --suite $(SUITE)

raises: setup-all .venv/spark.jsa ## lists the errors of the package that no test reaches; runs all tests but the long ones
	@$(PY) -m tests.raises --numprocesses=3 --no-loadscope-reorder -m 'not long'

docs: setup ## the documentation, in docs/_build; warnings are errors
	@$(PY) docs/write_configuration.py && $(PY) docs/write_contracts.py
	@$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build && echo "docs/_build/index.html"

lint: setup
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

type: setup
	@$(PY) -m mypy

bench: setup-all setup-peers ## all benchmarks, in about 75 minutes; see jobs/bench.py --help
	@$(PY) jobs/bench.py launch
	@$(PY) jobs/bench.py step
	@$(PY) jobs/bench.py track
	@$(PY) jobs/bench.py predict
	@$(PY) jobs/bench.py loader
	@$(PY) jobs/bench.py shards
	@$(PY) jobs/bench.py scale
	@$(PY) jobs/bench.py filters
	@$(PY) jobs/bench.py trials
	@$(PY) jobs/bench.py recovery
	@$(PY) jobs/bench.py literature
	@$(PY) jobs/bench.py parallel
	@$(PY) jobs/bench.py exchange

clean:
	rm -rf .venv .venv-petastorm .venv-peers .venv-oldest .wheels .data runs build dist docs/_build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache spark-warehouse metastore_db derby.log

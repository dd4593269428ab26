# Everything happens in .venv, which `make install` builds once: what locks/ lists, by its hash, then torch and this.
# Paths are relative, so the project may stand in a folder with spaces in its name.

PYTHON ?= python3
PY = .venv/bin/python
LOCKED = $(PY) -m pip install --require-hashes --no-deps --requirement
# Of `make fuzz`: seconds for each reader.
SECONDS = 600
SEED = 0

.PHONY: install run test pytest test-frameworks test-slow test-wheel fuzz lint results docs clean

install: .venv/installed

.venv/installed: pyproject.toml lab/pyproject.toml constraints.txt locks/dev.txt CMakeLists.txt lab/CMakeLists.txt $(wildcard src/laconic/*/native/*) lab/src/laconic_lab/network/relay.cpp
	$(PYTHON) -c 'import sys; sys.exit("laconic needs Python 3.11 or newer; try: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	@echo 'installing torch and the rest into .venv: some minutes, and 1 to 5 GB'
	$(LOCKED) locks/dev.txt
	$(PY) -m pip install --no-build-isolation --constraint constraints.txt --editable '.[dev]' --editable lab
	touch $@

run: install
	$(PY) -m laconic demo

test: install
	$(MAKE) --jobs 2 --no-print-directory lint pytest

pytest: install
	$(PY) -m pytest -m 'not slow' --numprocesses 3 --dist loadgroup

test-frameworks: .venv/frameworks
	$(PY) -m pytest tests/integrations -m 'not slow'

test-slow: install
	$(PY) -m pytest -m slow

test-wheel: install
	$(PY) tools/try_wheel.py  # other versions: --python python3.11 --torch 2.6.0

fuzz: install
	$(PY) -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/check_names.py src lab/src

results: install
	$(PY) tools/results.py run  # what no load changes; `run --machine lab` does the rest

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

.venv/docs: .venv/installed locks/docs.txt
	$(LOCKED) locks/docs.txt --quiet
	touch $@

.venv/frameworks: .venv/installed
	$(PY) -m pip install --quiet --constraint constraints.txt accelerate lightning mlflow-skinny prometheus-client transformers wandb "torchft; platform_machine == 'x86_64' and sys_platform == 'linux'"  # the extra `frameworks`
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build lab/build src/laconic/kernels/cpu/*.so src/laconic/transport/*.so lab/src/laconic_lab/network/relay

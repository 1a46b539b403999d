# make demo ARGS="--steps 20 --compare bf16,fp8"; make test ARGS="tests/fp8rl -x"; PYTHON=python3.12
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Images of containers often set it. Then each process compiles all of the engines' Python again,
# which doubles the time of an import, and the tests start dozens of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test slow fuzz contract matrix lock lint format docs dist clean

help:
	@echo "make demo    the whole FP8 RL loop on this CPU (options: ARGS=\"--help\")"
	@echo "make test    the tests, without the slow ones"
	@echo "make slow    the slow ones: bad inputs, interrupts, several ranks, every model family"
	@echo "make fuzz    bad inputs, interrupts and kills, for longer (docs/measurements/fuzz.md)"
	@echo "make contract what we use of NeMo RL, against its sources (CONTRIBUTING.md)"
	@echo "make matrix  the engine tests with other versions of engines and Python (docs/versions.md)"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff format the code and fix what it can"
	@echo "make docs    the site, into out/site"
	@echo "make dist    wheel and sdist, into dist/; tried in an empty environment"
	@echo "make clean   remove .venv, .nox and caches; results in out/ stay"
	@echo "make lock    resolve the dependencies into tools/cpu.txt"
	@echo "All install into .venv first. PYTHON=python3.12 names the Python to use."

# Does nothing when .venv is up to date.
install:
	@$(PYTHON) tools/install.py

demo: install
	@$(BIN)/fp8rl demo $(ARGS)

test: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" $(ARGS)

slow: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow $(ARGS)

fuzz: install
	$(BIN)/python benchmarks/reliability.py $(ARGS)

contract: install
	$(BIN)/python -m pytest -v -rsP -p no:warnings tests/contract $(ARGS)

matrix: install
	$(BIN)/nox $(ARGS)

# Resolves the dependency groups of pyproject.toml anew.
lock: install
	$(BIN)/nox -s lock

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: install
	$(BIN)/mkdocs build --strict

dist: install
	$(BIN)/nox -s dist

clean:
	rm -rf .venv .nox build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

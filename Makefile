# Everything a fresh clone needs: `make demo` and `make test` set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all lint format clean

demo: $(INSTALLED)
	$(BIN)/fedshift run

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto
	$(BIN)/python -m pytest -q --doctest-modules src/fedshift

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto --long
	$(BIN)/python -m pytest -q --doctest-modules src/fedshift

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: its pin in constraints.txt is what keeps other packages from fetching another build
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache

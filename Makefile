# Everything a fresh clone needs: `make demo` and `make test` set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# what is installed; constraints-lowest.txt has the lowest torch we claim
CONSTRAINTS ?= constraints.txt
# for machines that can fetch nothing: a folder of unpacked wheels beside what their Python has
WHEELS ?= .wheels
GPU_PYTHON ?= 3.12

.PHONY: demo quick test test-system test-grid test-long test-all test-kernels gpu gpu-speed wheels docs lint format clean

demo: $(INSTALLED)
	$(BIN)/fedshift run

# while one writes: the contract, one method of each family, the sequential engine
quick: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto --tier quick

# everything that needs no other process
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto
	$(BIN)/python -m pytest -q -n auto --doctest-modules src/fedshift

# real processes: killed runs, worker pools, scripts, the installed wheel
test-system: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --tier system

# every case of every grid
test-grid: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto --tier grid

# minutes for one case: federations of every system under TLS, fuzzed input
test-long: $(INSTALLED)
	$(BIN)/python -m pytest -q --tier long

test-all: test test-system test-grid test-long

# kernels of our own in Triton's interpreter, on a CPU; installs Triton (0.7 GB), after which test-system has them too
test-kernels: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) triton
	$(BIN)/python -m pytest -q --tier system tests/engines/test_kernels.py

# what CI cannot check; takes any Python that has torch, and installs nothing
gpu:
	PYTHONPATH=$(WHEELS):src:. $(PYTHON) benchmarks/gpu.py

# the folder that `make gpu` asks for where the machine with the GPU has torch and no network: carry it there
wheels: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --upgrade --target $(WHEELS) --only-binary :all: \
	  --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  pydantic loky cloudpickle pytest-xdist

# every number of docs/how-to/speed.md that needs no data set
gpu-speed:
	PYTHONPATH=$(WHEELS):src:. $(PYTHON) benchmarks/networks.py
	PYTHONPATH=$(WHEELS):src:. $(PYTHON) benchmarks/adapters.py gpu
	PYTHONPATH=$(WHEELS):src:. $(PYTHON) benchmarks/fdse.py gpu
	PYTHONPATH=$(WHEELS):src:. $(PYTHON) benchmarks/speed.py clients
	PYTHONPATH=$(WHEELS):src:. $(PYTHON) benchmarks/speed.py cpu

# the site, into site/: without network, strict, its notebook run on the way
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: its pin there is what keeps other packages from fetching another build
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache

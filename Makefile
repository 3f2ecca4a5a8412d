# Two commands do everything: `make reproduce` and `make test`. Both set up first, and cost nothing where that is done.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help reproduce test check lint types contracts shapes examples bench mutants clean

help:
	@echo "make reproduce   set up, run the main job, say where its table and figure are"
	@echo "make test        set up, run all tests"
	@echo "make check       tests, lint, types, import contracts and examples: what CI runs"
	@echo "make bench       measure"
	@echo "make mutants     break the mathematics on purpose and list what no test notices"
	@echo "make clean       remove the environment and everything that was made"

reproduce: $(READY)
	$(BIN)/xentflow reproduce
	@echo "table:  results/reproduce/table.md"
	@echo "figure: results/reproduce/figure1.png"
	@echo "page:   results/reproduce/report.html"

# One worker a core, each with one thread; what is left over at the end is shared out anew.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: test lint types contracts shapes examples

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

shapes: $(READY)
	$(BIN)/python -m pytest -q --shapes tests/test_potentials.py tests/test_objective.py tests/test_models.py \
		tests/test_gradient.py tests/test_attention.py tests/test_flow.py

examples: $(READY)
	@for example in examples/*.py; do [ -e "$$example" ] || continue; echo "$$example"; $(BIN)/python "$$example" || exit 1; done

bench: $(READY)
	for what in training loss attention block; do $(BIN)/xentflow bench $$what --output results/bench/$$what || exit 1; done

mutants: $(READY)
	$(BIN)/python tools/mutate.py

# torch comes first and by its pin: resolved among other packages, its newest and far larger build would be chosen.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "xentflow needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12"; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $(READY)

clean:
	rm -rf .venv results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

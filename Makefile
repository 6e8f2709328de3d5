# Every command sets up what it needs in .venv; a fresh machine has only Python, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NAME ?= demo
ARGS ?=

.PHONY: demo test test-httpx test-peers test-arm64 test-spark lint bench soak clean

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' 1>&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps rapidocr-onnxruntime==1.4.4 1>&2  # only its ONNX files are used
	@touch $@

demo: $(STAMP)  ## the main job: readers, an OCR model, the cache, learned prefetch, a server that dies
	@$(BIN)/python -m examples.demo $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

test-httpx: $(STAMP)  ## the promises once more, on the original httpx instead of httpx2
	@TEST_HTTP_LIBRARY=httpx $(BIN)/python -m pytest tests/test_promises.py $(ARGS)

test-arm64: $(STAMP)  ## tests/edge on an emulated Raspberry Pi 3 (Debian: as root, or with qemu-user-static and mmdebstrap installed)
	@tests/arm64/run.sh $(BIN)/python $(VENV)/arm64 $(ARGS)

test-spark: $(STAMP)  ## mining on a Spark cluster of one machine (pyspark, 400 MB; needs Java 17)
	@$(BIN)/python -c 'import pyspark' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'pyspark>=4.0' 1>&2
	@$(BIN)/python -m pytest tests/spark $(ARGS)

test-peers: $(STAMP)  ## the client against Triton, MLServer and KServe, installed into .venv-peers on first use
	@$(BIN)/python -m tests.peers.venvs && $(BIN)/python -m pytest tests/peers $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(STAMP)  ## make bench NAME=demo ARGS="--quick --json"
	@$(BIN)/python tests/benchmarks/$(NAME).py $(ARGS)

soak: $(STAMP)  ## make soak ARGS="--minutes 10 --clients 50": faults, and what must hold all the same
	@$(BIN)/python -m tests.soak $(ARGS)

clean:
	rm -rf $(VENV) .venv-peers .pytest_cache .mypy_cache .ruff_cache dist

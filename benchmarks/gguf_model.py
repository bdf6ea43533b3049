"""A model out of a GGUF file, as vLLM wants it: safetensors, config and tokenizer.

The weights are dequantized once, into a folder of the cache, and reused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_h2o.core.folders import cache_root

_MARKER = "complete"
_ADDS_BOS = "tokenizer.ggml.add_bos_token"


def ensure(name: str, gguf: Callable[[Path], Path], dtype: str = "float32") -> Path:
    """Return the folder of a model, converting it on first use.

    Args:
        name: Of the folder in `cache_root`.
        gguf: Returns the GGUF file; may write it into the folder it is given,
            which lasts as long as the conversion.
        dtype: Of the weights.

    Returns:
        A folder with safetensors weights, config and tokenizer.
    """
    target = cache_root() / name
    if not (target / _MARKER).exists():
        with tempfile.TemporaryDirectory() as scratch:
            _convert(gguf(Path(scratch)), target, dtype)
    return target


def _convert(gguf: Path, target: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"converting {gguf.name} to safetensors in {target} (once)", flush=True)
    partial = target.with_suffix(f".partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if _adds_bos(gguf):
        # transformers leaves it out; saved, it goes in front of every text.
        tokenizer.add_bos_token = True
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
    )
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / _MARKER).touch()
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _adds_bos(gguf: Path) -> bool:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field(_ADDS_BOS)
    return field is not None and bool(field.contents())

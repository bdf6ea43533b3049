"""What gives a byte of what requests hold its meaning, as a hash.

With `--h2o-keep-folder` it names the folder of files that an engine may go on from, so
that what another model, other weights, another policy or another layout has left there
is never found.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from huggingface_hub import snapshot_download

from vllm_h2o.calibration.ranks import of_first_rank

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_h2o.calibration.resolve import Resolved
    from vllm_h2o.core.spec import H2OAttentionSpec

_OF_NO_BYTE = (
    "keep", "keep_folder", "keep_size", "keep_seconds", "keep_sessions", "chosen",
    "resident_why",
)  # fmt: skip
"""Fields of the policy that say nothing of what is held."""
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
"""Of files with weights."""


def fingerprint(config: VllmConfig, resolved: Resolved, spec: H2OAttentionSpec) -> str:
    """The hash, the same on all tensor-parallel ranks.

    Args:
        config: The engine's.
        resolved: What its start has decided.
        spec: Of the layers that evict.
    """
    profile, policy = resolved.profile, asdict(resolved.config)
    for name in _OF_NO_BYTE:
        del policy[name]
    said = config.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        said.pop(name, None)
    about: dict[str, Any] = {
        "vllm": vllm.__version__,
        "model": said,
        "dtype": str(config.model_config.dtype),
        "device": resolved.device,
        "policy": policy,
        "by_head": resolved.by_head,
        "profile": profile and asdict(profile),
        "longest": spec.max_model_len,
        "hash_block_size": config.cache_config.block_size,
        "hash": config.cache_config.prefix_caching_hash_algo,
        "page": [spec.page_slots, spec.page_size_bytes, asdict(spec.cut)],
        "loaded": [
            str(config.load_config.load_format),
            config.model_config.quantization,
        ],
        "weights": _weights(config.model_config, config.load_config.download_dir),
    }
    text = json.dumps(about, sort_keys=True, default=str)
    # Ranks on other machines may see other files.
    return of_first_rank(hashlib.sha256(text.encode()).hexdigest()[:32])


def _weights(config: ModelConfig, folder: str | None) -> list[Any]:
    """What tells weights from others: their files' names, sizes, and times or hashes.

    Not what is in memory: layers may have packed it away.

    Args:
        config: The model's.
        folder: Where models are downloaded to; None: the hub's cache.
    """
    place = Path(config.model)
    if not place.exists():
        try:
            revision = config.revision
            place = Path(
                snapshot_download(
                    config.model,
                    revision=revision,
                    cache_dir=folder,
                    local_files_only=True,
                )  # fmt: skip
            )
        except (OSError, ValueError):  # Loaded in another way: from a bucket, say.
            return [config.model, revision]
    files = place.iterdir() if place.is_dir() else [place]
    files = sorted(file for file in files if file.is_file())
    found = []
    # Without any of these suffixes the weights may be in any of the files.
    for file in [x for x in files if x.suffix in _SUFFIXES] or files:
        # The hub's cache has links to files whose names are their hashes.
        name, about = file.resolve().name, file.stat()
        when = name if file.is_symlink() else about.st_mtime_ns
        found.append([file.name, about.st_size, when])
    return found

"""What `--h2o-keep-folder` needs of the engine, and of the folder."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_h2o.policy.options import bad

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_h2o.policy.config import H2OConfig

_HASHES = ("sha256", "sha256_cbor")
"""Of vLLM's hashes of tokens those that are the same in every process."""


def check_keep_folder(vllm_config: VllmConfig, config: H2OConfig) -> None:
    """Check before anything starts; a folder that is not there is made later.

    Args:
        vllm_config: The engine's.
        config: The policy.

    Raises:
        ValueError: Files could not be written, or would not be found again.
    """
    if not config.keep_folder:
        return
    hash_ = vllm_config.cache_config.prefix_caching_hash_algo
    parallel = vllm_config.parallel_config
    why = ""
    if hash_ not in _HASHES:
        why = f"--prefix-caching-hash-algo is {hash_!r}, which differs by process: use "
        why += f"{_HASHES[0]!r}"
    elif parallel.pipeline_parallel_size > 1:
        why = "a stage of a pipeline has some layers only: use "
        why += "--pipeline-parallel-size 1"
    elif parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        # Files are looked for on this machine.
        why = "ranks may be on other machines: use --nnodes 1 and "
        why += "--distributed-executor-backend mp"
    if why := why or _why_not(Path(config.keep_folder), config.keep_size):
        raise bad("keep_folder", config.keep_folder, f"{why}, or drop it")


def _why_not(folder: Path, gib: float) -> str:
    """Why files can not be written below a folder; empty: they can."""
    if not folder.is_absolute():
        return "use an absolute path, which is the same in every process"
    there = folder if folder.exists() else folder.parent
    if not there.is_dir():
        return f"{there} is no folder: make it"
    if folder.is_symlink():
        return f"it is a link: use {folder.resolve()}"
    if there == folder:
        found = folder.lstat()
        if found.st_uid != os.getuid():
            return "it belongs to another user, and what is kept is private: use yours"
        if stat.S_IMODE(found.st_mode) & 0o077:
            return f"others may use it, and what is kept is private: chmod 700 {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"nothing can be written to {there}: use another"
    free = shutil.disk_usage(there).free
    used = 0
    for file in folder.glob("*/*"):
        try:
            used += file.lstat().st_size
        except FileNotFoundError:
            continue  # Another engine has just removed or renamed it.
    if (room := (free + used) / 2**30) < gib:
        return (
            f"it has room for {room:.1f} GiB, and --h2o-keep-size is {gib:g}: use "
            "less of it, or another"
        )
    return ""

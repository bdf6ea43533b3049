"""The head profiles that engines have measured, each found by what its model answers.

A file for each model lies in `$VLLM_H2O_CACHE/heads` (else `~/.cache/vllm_h2o/heads`).
Neither the path of a model nor its dtype changes what it answers to a few fixed ids by
much; other weights do. A file's name says which texts the profile is of: one of other
texts is not found.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from vllm.logger import init_logger

from vllm_h2o.calibration import texts
from vllm_h2o.core.folders import cache_root
from vllm_h2o.policy.files import write_whole
from vllm_h2o.policy.options import shortened
from vllm_h2o.policy.profile import NO_PROFILE, HeadProfile

logger = init_logger(f"vllm.{__name__}")

VERSION = 6
"""Of a file; models with files of others are measured again."""
LEAST_COSINE = 0.998
"""Cosine of the answers of one model in two dtypes, at least."""


def cache_folder() -> Path:
    """The folder of the files."""
    return cache_root() / "heads"


def _prefix(num_layers: int, num_kv_heads: int) -> str:
    """What the names of files begin with that models of this shape may have."""
    return f"{num_layers}x{num_kv_heads}-{texts.digest()}-"


def find(
    answers: Sequence[float], num_layers: int, num_kv_heads: int, gated: bool = False
) -> tuple[Path, HeadProfile] | None:
    """Find a model's profile: the one whose answers are the nearest.

    Args:
        answers: Unit vector: what the model answers to fixed ids.
        num_layers: Attention layers that evict.
        num_kv_heads: KV heads of a layer, of all ranks.
        gated: Whether a file with a gate is better than one without.
    """
    found, best = None, (LEAST_COSINE, False, 0)
    files = cache_folder().glob(f"{_prefix(num_layers, num_kv_heads)}*.json")
    for path in sorted(files):
        theirs, profile = _read(path)
        if profile is None or len(theirs) != len(answers):
            continue
        cosine = round(float(np.dot(theirs, answers)), 4)
        logger.debug("H2O: answers like those of %s by %.4f", path, cosine)
        # Of files of one model the one from the longest texts.
        has_gate = gated and profile.gate is not None
        if (rank := (cosine, has_gate, profile.context_tokens)) >= best:
            found, best = (path, profile), rank
    return found


def keep(answers: Sequence[float], profile: HeadProfile) -> Path:
    """Write a file at once, in place of this model's last and of what led to it.

    Raises:
        OSError: It can not be written.
    """
    folder = cache_folder()
    name = _name(answers, profile.num_layers, profile.num_kv_heads)
    path = folder / f"{name}.json"
    content = {"version": VERSION, "answers": answers, "profile": asdict(profile)}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content) + "\n")
    for partial in folder.glob(f"{name}-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    return path


def progress_folder(
    answers: Sequence[float],
    num_layers: int,
    num_kv_heads: int,
    token_ids: Sequence[Sequence[int]],
) -> Path:
    """Where what has been read of texts is kept, until all are and `keep` removes it.

    Args:
        answers: As of `find`, and so are the next two.
        num_layers: See there.
        num_kv_heads: See there.
        token_ids: The texts; of others, and of another version, nothing is taken.
    """
    name = _name(answers, num_layers, num_kv_heads)
    texts = hashlib.sha256(json.dumps([VERSION, *token_ids]).encode()).hexdigest()
    return cache_folder() / f"{name}-{texts[:16]}.partial"


def _name(answers: Sequence[float], num_layers: int, num_kv_heads: int) -> str:
    """Of a model with exactly these answers."""
    digest = hashlib.sha256(json.dumps(list(answers)).encode()).hexdigest()
    return _prefix(num_layers, num_kv_heads) + digest[:16]


def _read(path: Path) -> tuple[Sequence[float], HeadProfile | None]:
    """Answers and profile; None: the file is of another version, or damaged."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            return (), None
        profile = HeadProfile.of_json(content["profile"])
        if not path.name.startswith(_prefix(profile.num_layers, profile.num_kv_heads)):
            raise ValueError("it has the profile of another model")
        return [float(x) for x in content["answers"]], profile
    except NO_PROFILE as error:
        logger.warning_once(
            "H2O can not use %s, a measured head profile: %s; delete it",
            path, shortened(error),
        )  # fmt: skip
        return (), None

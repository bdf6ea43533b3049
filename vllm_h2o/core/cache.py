"""Where what is built or measured once is kept between starts."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Folder of everything derived: `$VLLM_H2O_CACHE`, else `~/.cache/vllm_h2o`."""
    named = os.environ.get("VLLM_H2O_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "vllm_h2o"

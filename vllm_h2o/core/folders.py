"""Where what is built or measured once is kept between starts."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "VLLM_H2O_CACHE"
"""Environment variable: the folder of everything derived."""


def cache_root() -> Path:
    """Folder of everything derived: `$VLLM_H2O_CACHE`, else `~/.cache/vllm_h2o`.

    Raises:
        OSError: There is no home folder for the default.
    """
    named = os.environ.get(CACHE)
    try:
        return Path(named or "~/.cache/vllm_h2o").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error

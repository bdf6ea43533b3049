"""What has been read of the texts that measure a model, until all of them are.

A start that is cut short, by whom or what ever, leaves a file for each pass that it
made; a later one goes on from there.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from vllm_h2o.policy.files import write_whole
from vllm_h2o.policy.options import shortened

logger = init_logger(f"vllm.{__name__}")

Arrays = Mapping[str, npt.NDArray[Any]]


class Progress:
    """The passes of one measurement, by name."""

    def __init__(self, folder: Path | None = None) -> None:
        """Find what is there.

        Args:
            folder: Of the files; None: nothing is kept.
        """
        self._folder = folder

    def load(self, name: str) -> Arrays | None:
        """What a pass found; None: it was not made, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / f"{name}.npz", allow_pickle=False) as file:
                return dict(file)
        except FileNotFoundError:
            return None
        except Exception as error:  # What a damaged file raises is not said anywhere.
            logger.warning_once(
                "H2O reads a text again, as what was kept of it can not be used: %s",
                shortened(error),
            )
            return None

    def save(self, name: str, arrays: Arrays) -> None:
        """Keep what a pass found; a start goes on where that can not be."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, allow_pickle=False, **arrays)
            write_whole(self._folder / f"{name}.npz", content.getvalue())
        except OSError as error:
            logger.warning_once(
                "H2O can not keep what it has read so far, and would read it again "
                "were this start cut short (%s): set VLLM_H2O_CACHE to a folder that "
                "can be written to",
                shortened(error),
            )

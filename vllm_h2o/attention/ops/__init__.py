"""What is done to resident rows; `contract` says what kernels have to be."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from vllm_h2o.attention.ops.contract import Capability, Kernels
from vllm_h2o.attention.ops.types import (
    DecodeParams,
    Kept,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.policy.options import shown

__all__ = [
    "KERNELS", "Capability", "DecodeParams", "Kept", "Kernels", "ResidentRows",
    "ScoredLayer", "kernels_of", "runs_reference",
]  # fmt: skip

KERNELS = "VLLM_H2O_KERNELS"
"""Environment variable: `reference` runs everything in plain torch, on CPU."""


def runs_reference() -> bool:
    """Whether plain torch runs in place of the kernels, as `VLLM_H2O_KERNELS` says.

    Raises:
        ValueError: It says something else.
    """
    named = os.environ.get(KERNELS, "")
    if named not in ("", "reference"):
        raise ValueError(
            f"{KERNELS} is {shown(named)}: unset it, or set it to 'reference', which "
            "runs plain torch in place of the kernels, slowly"
        )
    return named == "reference"


def kernels_of(device: torch.device) -> Kernels:
    """The kernels of a device, or plain torch where that is asked for."""
    name = "cpu" if device.type == "cpu" else "triton"
    if runs_reference():
        name = "reference"
    kernels: Any = importlib.import_module(f"{__name__}.{name}")
    return kernels

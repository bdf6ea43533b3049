"""What is done to resident rows; `contract` says what kernels have to be."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points
from typing import Any

import torch

from vllm_h2o.attention.ops.contract import Capability, Kernels
from vllm_h2o.attention.ops.types import (
    SCRATCH_BYTES,
    Chunk,
    DraftLog,
    Held,
    Kept,
    LayerParams,
    LoggedLayer,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.policy.options import shown

__all__ = [
    "KERNELS", "Capability", "Chunk", "DraftLog", "Held", "Kept", "Kernels",
    "LayerParams", "LoggedLayer", "ResidentRows", "SCRATCH_BYTES", "ScoredLayer",
    "kernels_of", "named_kernels",
]  # fmt: skip

KERNELS = "VLLM_H2O_KERNELS"
"""Environment variable: kernels by name, `REFERENCE` or an entry point's."""
REFERENCE = "reference"
"""Plain torch in place of the kernels, on CPU."""
ENTRY_POINTS = "vllm_h2o.kernels"
"""The group of entry points by which other packages bring kernels."""


def named_kernels() -> Kernels | None:
    """The kernels that `VLLM_H2O_KERNELS` names; None: it names none.

    A package's entry point is `name = "module"`, a module that is as `Kernels` says.

    Raises:
        ValueError: It names what nobody brings, or what is no such module.
    """
    name = os.environ.get(KERNELS, "")
    if not name:
        return None
    kernels: Any
    if name == REFERENCE:
        kernels = importlib.import_module(f"{__name__}.{name}")
        return kernels
    points = entry_points(group=ENTRY_POINTS)
    if name not in points.names:
        others = "".join(f", {shown(other)}" for other in sorted(points.names))
        raise ValueError(
            f"{KERNELS} is {shown(name)}: unset it, or set it to one of "
            f"{shown(REFERENCE)}, which runs plain torch in place of the kernels, "
            f"slowly{others}"
        )
    try:
        kernels = points[name].load()
    except Exception as error:
        raise _unusable(name, f"{type(error).__name__}: {error}") from error
    missing = sorted(part for part in _parts() if not hasattr(kernels, part))
    if missing:
        raise _unusable(name, f"it lacks {', '.join(missing)}")
    return kernels


def _parts() -> set[str]:
    declared = {*vars(Kernels), *Kernels.__annotations__}
    return {name for name in declared if not name.startswith("_")}


def _unusable(name: str, why: str) -> ValueError:
    value = entry_points(group=ENTRY_POINTS)[name].value
    return ValueError(
        f"{KERNELS} is {shown(name)}, but its entry point {value!r} ({ENTRY_POINTS}) "
        f"can not be used ({why}): mend the package, or unset {KERNELS}"
    )


def kernels_of(device: torch.device) -> Kernels:
    """The kernels that `VLLM_H2O_KERNELS` names, or else those of the device."""
    named = named_kernels()
    if named is not None:
        return named
    name = "cpu" if device.type == "cpu" else "triton"
    kernels: Any = importlib.import_module(f"{__name__}.{name}")
    return kernels

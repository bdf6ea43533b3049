"""The type of what requests hold, where the user leaves it open."""

from __future__ import annotations

from vllm_h2o.policy.config import INT8, MODEL, H2OConfig

INT8_PAYS_ON = ("cpu",)
"""Devices, as torch names their kinds, on which attention over int8 has been seen to
take no longer than over the model's type. On GPUs no card has shown it yet."""


def resident_dtype_of(
    config: H2OConfig, device: str, can_round: bool
) -> tuple[str, str]:
    """The value of `H2OConfig.resident_dtype` that `"auto"` is, and why.

    Args:
        config: The policy.
        device: Torch's name of its kind.
        can_round: Whether the kernels in force have int8.
    """
    in_the_way = {
        "values merge": config.merges,
        "whole blocks compete": config.eviction_unit == "block",
        "keys move": config.moves_keys,
        "the kernels have no int8": not can_round,
        f"int8 is not known to pay on {device}": device not in INT8_PAYS_ON,
    }
    for why, holds in in_the_way.items():
        if holds:
            return MODEL, f"as {why}"
    return INT8, "which holds more tokens in the same memory"

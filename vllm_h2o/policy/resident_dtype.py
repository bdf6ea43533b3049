"""The type of what requests hold, where the user leaves it open."""

from __future__ import annotations

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.options import INT8, MODEL, shown
from vllm_h2o.policy.rules import broken_need

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
    need = broken_need(config, resident_dtype=INT8)
    if need is not None:
        other = need.other if need.option == "resident_dtype" else need.option
        given = shown(getattr(config, other))
        return MODEL, f"as int8 does not go with h2o_{other}={given}"
    if not can_round:
        return MODEL, "as the kernels have no int8"
    if device not in INT8_PAYS_ON:
        return MODEL, f"as int8 is not known to pay on {device}"
    return INT8, "which holds more tokens in the same memory"

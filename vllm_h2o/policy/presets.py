"""The policies that have a name, and how a user's options become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.options import (
    ALL_QUERIES,
    ATTENTION,
    AUTO,
    GATE,
    MODEL,
    REQUEST,
    UNIFORM,
    bad,
    check_choice,
    shown,
)
from vllm_h2o.policy.rules import check_effects

_OF_ATTENTION = ("observation_window", "pooling")
_SUMS = H2OConfig(
    recent_ratio=0.5,
    sinks=0,
    score="sum",
    prompt_score=ATTENTION,
    resident_dtype=MODEL,
    head_budgets=UNIFORM,
)

PRESETS: Mapping[str, H2OConfig] = {
    "h2o": H2OConfig(),
    "gate": H2OConfig(policy="gate", prompt_score=GATE),
    "h2o-paper": replace(
        _SUMS, policy="h2o-paper", observation_window=ALL_QUERIES, pooling=1
    ),
    "snapkv": replace(_SUMS, policy="snapkv", pooling=7),
    "tova": replace(
        _SUMS,
        policy="tova",
        recent_ratio=0.0,
        observation_window=1,
        pooling=1,
        score_decay=0.0,
    ),
    "cake": replace(
        _SUMS,
        policy="cake",
        pooling=5,
        score="cake",
        score_decay=0.0,
        head_budgets=REQUEST,
    ),
    "mpcache": H2OConfig(
        policy="mpcache",
        budget="50%",
        recent_ratio=0.1,
        sinks=0,
        observation_window="20%",
        pooling=1,
        prompt_score=ATTENTION,
        read="20%",
        resident_dtype=MODEL,
        head_budgets=UNIFORM,
    ),
    "d2o": replace(
        _SUMS,
        policy="d2o",
        sinks=4,
        observation_window=ALL_QUERIES,
        pooling=1,
        score="d2o",
        merge="value",
        head_budgets=REQUEST,
    ),
    "streaming": replace(
        _SUMS,
        policy="streaming",
        recent_ratio=1.0,
        sinks=4,
        observation_window=1,
        pooling=1,
    ),
}
"""The policies that evict; `full` is the absence of one."""

FULL = "full"
POLICY_NAMES = (FULL, *PRESETS)

OPTION_NAMES = tuple(
    field.name for field in dataclasses.fields(H2OConfig) if field.metadata
)


def resolve_config(
    policy: str | None, enable_h2o: bool | None, options: Mapping[str, Any]
) -> H2OConfig | None:
    """Merge a policy name and explicit options into a config.

    Args:
        policy: `kv_policy` as given, None when it was not.
        enable_h2o: As given, None when it was not. True means `policy="h2o"`.
        options: Explicit options by field name (no `h2o_` prefix).

    Returns:
        The config, or None when nothing is to be evicted.

    Raises:
        ValueError: Unknown or contradictory options.
    """
    if policy is not None:
        check_choice("kv_policy", policy, POLICY_NAMES, prefix="")
    if not isinstance(enable_h2o, bool | None):
        raise bad("enable_h2o", enable_h2o, "use True or False", prefix="")
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        raise ValueError(
            f"unknown H2O option {shown(unknown[0])}: use one of "
            f"{', '.join(OPTION_NAMES)}"
        )
    if enable_h2o is True and policy not in (None, "h2o"):
        raise ValueError(
            f"enable_h2o=True means kv_policy='h2o', but kv_policy={shown(policy)} "
            "was given too: drop one of them"
        )
    if enable_h2o is False and policy not in (None, FULL):
        raise ValueError(
            f"enable_h2o=False turns eviction off, but kv_policy={shown(policy)} "
            "turns it on: drop one of them"
        )
    name = "h2o" if enable_h2o else (policy or FULL)
    if name == FULL:
        if options:
            option, value = next(iter(options.items()))
            asked = (
                f"kv_policy={FULL!r}"
                if policy
                else ("enable_h2o=False" if enable_h2o is False else "no kv_policy")
            )
            raise ValueError(
                f"h2o_{option}={shown(value)} has no effect with {asked}: "
                "add kv_policy='h2o' (--kv-policy h2o) or drop the option"
            )
        return None
    config = replace(PRESETS[name], **options)
    steered = any(option in options for option in _OF_ATTENTION)
    if config.prompt_score == AUTO and (steered or not config.may_be_gated):
        config = replace(config, prompt_score=ATTENTION)
    check_effects(config, options)
    return config

"""Where the policy travels: `VllmConfig.additional_config["h2o"]`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_h2o.policy.config import MOST_SLOTS_PER_TOKEN, H2OConfig
from vllm_h2o.policy.geometry import ResidentBlock, slots_per_token
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.options import AUTO, shown
from vllm_h2o.policy.presets import FULL, POLICY_NAMES, resolve_config
from vllm_h2o.policy.resident_dtype import resident_dtype_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "h2o"
_LONGEST_KEY = "h2o_max_model_len"
TRAINED_KEY = "h2o_trained_length"
_RESIDENT_KEY = "h2o_noted_resident_dtype"
CALIBRATE = "VLLM_H2O_CALIBRATE"
"""Environment variable; at 0 the cache of head profiles is not used, and
`head_budgets="auto"` takes files only."""
CALIBRATE_SECONDS = "VLLM_H2O_CALIBRATE_SECONDS"
"""Environment variable; see `most_seconds`."""
_SAID = {
    **dict.fromkeys(("", "1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def uses_profile_cache() -> bool:
    """Whether engines look into the cache of head profiles, and measure what it lacks.

    Raises:
        ValueError: `VLLM_H2O_CALIBRATE` says neither yes nor no.
    """
    said = os.environ.get(CALIBRATE, "")
    known = _SAID.get(said.strip().lower())
    if known is None:
        raise ValueError(f"{CALIBRATE} is {shown(said)}: use 0 or 1, or unset it")
    return known


def most_seconds() -> float:
    """How long `head_budgets="auto"` may measure in a start; the next one reads on.

    Raises:
        ValueError: `VLLM_H2O_CALIBRATE_SECONDS` is no number above 0.
    """
    said = os.environ.get(CALIBRATE_SECONDS, "").strip()
    try:
        seconds = float(said or "inf")
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise ValueError(
            f"{CALIBRATE_SECONDS} is {shown(said)}: use a number of seconds above 0, "
            "or unset it"
        )
    return seconds


def h2o_config(vllm_config: VllmConfig) -> H2OConfig | None:
    """The policy in force, or None when H2O is off.

    Raises:
        ValueError: `additional_config["h2o"]` has a bad or unknown option.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    config = parse_settings(additional[CONFIG_KEY])
    if config is None:
        return None
    if config.moves_keys:
        config = replace(config, trained_length=additional.get(TRAINED_KEY, 0))
    if config.resident_dtype == AUTO:
        settings, *noted = additional.get(_RESIDENT_KEY, (None,))
        if settings == additional[CONFIG_KEY]:  # Else it is another engine's.
            dtype, why = noted
            config = replace(config, resident_dtype=dtype, resident_why=why)
    if config.quantizes:
        held = slots_per_token(config, *_shape(vllm_config))
        held = min(max(held, 1.0), MOST_SLOTS_PER_TOKEN)
        config = replace(config, slots_per_token=held)
    return config


def _shape(vllm_config: VllmConfig) -> tuple[int, int]:
    """Head size of a model, and bytes of an element of its type."""
    model = vllm_config.model_config
    assert isinstance(model.dtype, torch.dtype)
    return model.get_head_size(), model.dtype.itemsize


def parse_settings(settings: Any) -> H2OConfig | None:
    """Resolve `{"policy": name, option: value, ...}`."""
    if not isinstance(settings, dict):
        raise ValueError(
            f"additional_config['{CONFIG_KEY}'] is {shown(settings)}: use a dictionary "
            'such as {"policy": "h2o", "budget": 512}'
        )
    for name in settings:
        if not isinstance(name, str):
            raise ValueError(
                f"additional_config['{CONFIG_KEY}'] has the option {shown(name)}: use "
                "names of options, such as 'budget'"
            )
    options = dict(settings)
    policy = options.pop("policy", "h2o")
    if policy is None:
        raise ValueError(
            f"additional_config['{CONFIG_KEY}']['policy'] is None: use one of "
            f"{', '.join(POLICY_NAMES)}"
        )
    return resolve_config(policy, None, options)


def settings_of(config: H2OConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The dictionary that `parse_settings` turns back into `config`."""
    assert config.policy != FULL
    return {"policy": config.policy, **options}


def note_resident_dtype(vllm_config: VllmConfig, can_round: bool) -> None:
    """Note the type that `resident_dtype="auto"` stands for, for all processes alike.

    Args:
        vllm_config: Of an engine with H2O.
        can_round: Whether its kernels have int8.
    """
    config, additional = h2o_config(vllm_config), vllm_config.additional_config
    assert config is not None and isinstance(additional, dict)
    if config.resident_dtype == AUTO:
        device = vllm_config.device_config.device_type
        chosen = resident_dtype_of(config, device, can_round)
        # Not in place: see `note_longest`.
        noted = {_RESIDENT_KEY: (additional[CONFIG_KEY], *chosen)}
        vllm_config.additional_config = {**additional, **noted}


def note_longest(vllm_config: VllmConfig) -> None:
    """Note the length of the longest request, before vLLM shortens it.

    With `--max-model-len auto` it does so when the model is loaded, and processes learn
    of that at different times: what a share is of must be the same in all.
    """
    additional, model = vllm_config.additional_config, vllm_config.model_config
    assert isinstance(additional, dict)
    if model.original_max_model_len == -1:
        # Not in place: it may be the user's, with which another engine starts.
        noted = {_LONGEST_KEY: model.max_model_len}
        vllm_config.additional_config = {**additional, **noted}


def longest_request(vllm_config: VllmConfig) -> int:
    """Tokens that columns, budgets and their classes are made for, or more."""
    additional = vllm_config.additional_config
    assert isinstance(additional, dict)
    return additional.get(_LONGEST_KEY, vllm_config.model_config.max_model_len)


def layout_of(vllm_config: VllmConfig, config: H2OConfig) -> SlotLayout:
    """The slots of the longest request, in resident blocks.

    Raises:
        ValueError: See `SlotLayout.from_config`.
    """
    shape = vllm_config.cache_config.block_size, *_shape(vllm_config)
    # Pages of a block are no matter here: together they have its slots.
    slots = ResidentBlock.of(config, *shape).slots
    return SlotLayout.from_config(config, slots, longest_request(vllm_config))

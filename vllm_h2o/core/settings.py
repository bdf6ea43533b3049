"""Where the policy travels: `VllmConfig.additional_config["h2o"]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.presets import FULL, POLICY_NAMES, resolve_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "h2o"


def h2o_config(vllm_config: VllmConfig) -> H2OConfig | None:
    """The policy in force, or None when H2O is off.

    Raises:
        ValueError: `additional_config["h2o"]` has a bad or unknown option.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    return parse_settings(additional[CONFIG_KEY])


def parse_settings(settings: Any) -> H2OConfig | None:
    """Resolve `{"policy": name, option: value, ...}`."""
    if not isinstance(settings, dict):
        raise ValueError(
            f"additional_config['{CONFIG_KEY}'] is {settings!r}: use a dictionary "
            'such as {"policy": "h2o", "budget": 512}'
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


def settle(vllm_config: VllmConfig, **options: Any) -> None:
    """Put options in the place of those that the user left to the engine."""
    additional = vllm_config.additional_config
    assert isinstance(additional, dict)
    # Not in place: it may be the user's dictionary, with which another engine starts.
    settings = {**additional[CONFIG_KEY], **options}
    vllm_config.additional_config = {**additional, CONFIG_KEY: settings}

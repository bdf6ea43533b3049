"""Requests longer than the model was trained for (`--h2o-positions cache`).

Target: the engine arguments `hf_overrides` and `additional_config`.
Why: vLLM refuses a `max_model_len` of more tokens than the model's config says, and
    makes the tables of RoPE for these.
How: the config is told that there are more; what it says by itself travels beside the
    policy.
Remove when: vLLM sizes tables by `max_model_len`.
"""

from __future__ import annotations

from typing import Any

from vllm_h2o.core.settings import CONFIG_KEY, TRAINED_KEY, parse_settings
from vllm_h2o.policy.options import CACHE, TEXT, bad, shown
from vllm_h2o.policy.rotation import has_rotation

_LENGTH = "max_position_embeddings"


def lengthened(engine_args: Any, additional: Any) -> dict[str, Any]:
    """Engine arguments by which requests may be longer; none where no key moves.

    Args:
        engine_args: As given.
        additional: The `additional_config` that is to hold.

    Raises:
        ValueError: The model's own length is not known, or is not exceeded.
    """
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return {}
    config = parse_settings(additional[CONFIG_KEY])
    if config is None or not config.moves_keys:
        return {}
    given = engine_args.hf_overrides or {}
    if callable(given):
        fix = "give --hf-overrides as a dictionary, which a longer length can go into"
        raise bad("positions", CACHE, fix)
    overrides = dict(given)
    within, trained = _text_overrides(engine_args, overrides)
    if not isinstance(trained, int):
        fix = f"this model's config has no {_LENGTH}: use {TEXT!r}"
        raise bad("positions", CACHE, fix)
    longest = engine_args.max_model_len
    if not longest or longest <= trained:
        fix = (
            f"no effect with max_model_len={shown(longest)} (--max-model-len), as the "
            f"model was trained for {trained} tokens: use a number of more, or {TEXT!r}"
        )
        raise bad("positions", CACHE, fix)
    within[_LENGTH] = longest
    noted = {**additional, TRAINED_KEY: trained}
    return {"hf_overrides": overrides, "additional_config": noted}


def _text_overrides(
    engine_args: Any, overrides: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The part of the overrides that is the language model's, and the length that its
    config says with them."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config: Any = get_config(
        engine_args.hf_config_path or engine_args.model,
        engine_args.trust_remote_code,
        engine_args.revision,
        engine_args.code_revision,
        engine_args.config_format,
        hf_overrides_kw={
            name: value
            for name, value in overrides.items()
            if not isinstance(value, dict)
        },
        token=engine_args.hf_token,
    )
    text, within = get_hf_text_config(config), overrides
    if not has_rotation(text):
        fix = f"the keys of this model are not rotated: use {TEXT!r}"
        raise bad("positions", CACHE, fix)
    if text is not config:
        names = [name for name, part in vars(config).items() if part is text]
        if not names:
            fix = f"where this model's config has its {_LENGTH} is not known: use "
            raise bad("positions", CACHE, fix + repr(TEXT))
        within = overrides[names[0]] = dict(overrides.get(names[0], {}))
    return within, within.get(_LENGTH, getattr(text, _LENGTH, None))

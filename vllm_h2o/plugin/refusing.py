"""How an option is refused, and what several refusals look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_h2o.policy.options import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OFF = "or drop --kv-policy (kv_policy, enable_h2o)"


def refuse(option: str, value: Any, fix: str) -> None:
    """Raise the ValueError of a setting that H2O can not serve.

    Args:
        option: As the command line names it, or what it is.
        value: Its value.
        fix: What to use in its place.
    """
    raise ValueError(f"H2O does not support {option}={shown(value)}: {fix}, {_OFF}")


def layer_kinds(vllm_config: VllmConfig) -> set[str]:
    """Of the model's layers, as its config names them."""
    text = vllm_config.model_config.hf_text_config
    return set(getattr(text, "layer_types", None) or ("full_attention",))


def has_several_kinds(vllm_config: VllmConfig) -> bool:
    """Whether layers with a window or a state stand beside full attention."""
    kinds = layer_kinds(vllm_config)
    if vllm_config.model_config.is_hybrid:
        return True
    return bool(kinds - {"full_attention"}) and "full_attention" in kinds

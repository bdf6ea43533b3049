"""What KV connectors are served: those that move dense blocks of prompts.

A connector knows a block by the tokens in it and before it. So only what has seen all
of these may be stored, and what is loaded is read in place of the prompt's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_h2o.plugin.refusing import has_several_kinds, refuse
from vllm_h2o.policy.options import ATTENTION, GATE, NONE, shown

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from vllm_h2o.policy.config import H2OConfig

OPTION = "--kv-transfer-config"
EXAMPLE, MULTI = "ExampleConnector", "MultiConnector"
OFFLOADING, SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"
SERVED = OFFLOADING, SIMPLE, EXAMPLE, MULTI
"""Connectors of vLLM's that have been read, or run, with H2O."""
_WHY_NOT = {
    "NixlConnector": "it takes blocks of what is held for blocks of the prompt",
    "LMCacheConnectorV1": "it takes pages to be no longer than keys and values",
    "LMCacheMPConnector": "it takes pages to be no longer than keys and values",
}
_CPU = "CPUOffloadingSpec"


def check_connector(vllm_config: VllmConfig, config: H2OConfig) -> None:
    """Raise ValueError for a connector that H2O can not serve, or not with its policy.

    What `auto` comes to for prompts the worker knows.

    Args:
        vllm_config: The engine's.
        config: The policy.
    """
    if (transfer := vllm_config.kv_transfer_config) is None:
        return
    _check_each(transfer)
    scored = config.prompt_score == ATTENTION and config.keeps_heavy_set
    for holds, option, value, use in (
        # Their tokens have seen a compressed past, and vLLM's hashes all the same.
        (config.prefill_chunk, "--h2o-prefill-chunk", config.prefill_chunk, "0"),
        (config.keeps, "--h2o-keep", config.keep, shown(NONE)),
        # Queries that score do not run where their tokens are loaded.
        (scored, "--h2o-prompt-score", config.prompt_score, shown(GATE)),
    ):
        if holds:
            beside = f"{option} with {OPTION}"
            refuse(beside, value, f"use {use}, or drop {OPTION}")
    if has_several_kinds(vllm_config):
        why = "this model has layers with a window or a state of their own"
        refuse(OPTION, transfer.kv_connector, f"{why}: drop {OPTION}")


def _check_each(transfer: KVTransferConfig) -> None:
    """Check a connector, and those in a `MultiConnector`."""
    extra = transfer.kv_connector_extra_config or {}
    given = [(transfer.kv_connector, transfer.kv_connector_module_path, extra)]
    while given:
        name, path, extra = given.pop()
        if name not in SERVED or path:
            why = _WHY_NOT.get(str(name), "nobody has run it with H2O")
            why = "it is not vLLM's own" if path else why
            refuse(OPTION, name, f"{why}: use one of {', '.join(SERVED)}")
        if name == OFFLOADING:
            _check_offloading(extra)
        if name == MULTI:
            given += [
                (
                    one.get("kv_connector"),
                    one.get("kv_connector_module_path"),
                    one.get("kv_connector_extra_config") or {},
                )
                for one in extra.get("connectors", ())
            ]


def _check_offloading(extra: Mapping[str, Any]) -> None:
    option = f"{OPTION} {OFFLOADING}"
    if not extra.get("offload_prompt_only", True):
        # What is decoded has no dense blocks.
        fix = "use true, which is vLLM's default"
        refuse(f"{option} offload_prompt_only", False, fix)
    if (spec := extra.get("spec_name", _CPU)) != _CPU:
        # Files and stores of others know nothing of how long a page is.
        refuse(f"{option} spec_name", spec, f"use {_CPU!r}")

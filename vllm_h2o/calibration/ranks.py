"""What the tensor-parallel ranks of a model tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def of_first_rank(mine: Any) -> Any:
    """What the first tensor-parallel rank has, so that all decide alike."""
    group = get_tp_group()
    return mine if group.world_size == 1 else group.broadcast_object(mine, src=0)


def on_all_ranks(mine: list[bool]) -> list[bool]:
    """What holds on all tensor-parallel ranks, of as many statements."""
    group = get_tp_group()
    if group.world_size == 1:
        return mine
    held = torch.tensor(mine, dtype=torch.int32)
    op = torch.distributed.ReduceOp.MIN
    torch.distributed.all_reduce(held, op, group=group.cpu_group)
    return held.bool().tolist()


def of_all_ranks(mine: torch.Tensor, dim: int, num_kv_heads: int) -> torch.Tensor:
    """What all ranks have of the model's KV heads, in the host's memory.

    With fewer heads than ranks, neighbouring ranks have the same head and queries of
    their own: the mean counts.

    Args:
        mine: This rank's part.
        dim: The dimension of its KV heads.
        num_kv_heads: Of a layer, of all ranks together.
    """
    group = get_tp_group()
    mine = mine.to(group.device).contiguous()
    joined = group.all_gather(mine, dim=dim).cpu()
    if joined.shape[dim] == num_kv_heads:
        return joined
    return joined.unflatten(dim, (num_kv_heads, -1)).mean(dim=dim + 1)


def own_kv_heads(vllm_config: VllmConfig, count: int) -> slice:
    """This rank's `count` of the model's KV heads.

    With fewer heads than ranks, neighbouring ranks have the same head.
    """
    parallel = vllm_config.parallel_config
    total = vllm_config.model_config.get_total_num_kv_heads()
    first = parallel.rank % parallel.tensor_parallel_size * total
    first //= parallel.tensor_parallel_size
    return slice(first, first + count)

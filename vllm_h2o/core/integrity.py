"""What must hold of a pool's blocks after every step; asserted by tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import cycle, islice

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_h2o.core.manager import H2OManager


def check_integrity(
    managers: Iterable[SingleTypeKVCacheManager], pinned: Iterable[int] = ()
) -> None:
    """Assert that every block of a pool is free, null, or owned as counted.

    Args:
        managers: All managers of one block pool.
        pinned: Blocks that a KV connector holds on to, once for each time.
    """
    managers = tuple(managers)
    pool, null = managers[0].block_pool, managers[0].block_pool.null_block
    owners = Counter(pinned)
    for manager in managers:
        if isinstance(manager, H2OManager):
            _check_counts(manager)
        for request_id, blocks in manager.req_to_blocks.items():
            owned = blocks
            if isinstance(manager, H2OManager):
                owned = _owned(manager, request_id)
            owners.update(b.block_id for b in owned if b is not null)
            if isinstance(manager, H2OManager) and blocks:
                _check_request(manager, request_id)
    free = {b.block_id for b in pool.free_block_queue.get_all_free_blocks()}
    assert len(free) == pool.get_num_free_blocks()
    for block in pool.blocks:
        if block is null:
            continue
        count = owners.get(block.block_id, 0)
        assert block.ref_cnt == count, f"{block} has {count} owners"
        assert (block.block_id in free) == (count == 0), f"{block} is lost or reused"


def _owned(manager: H2OManager, request_id: str) -> list[KVCacheBlock]:
    """A request's blocks, each once."""
    blocks, life = manager.req_to_blocks[request_id], manager.lives.get(request_id)
    if life is None or not life.chunk or not manager.is_resident(request_id):
        return blocks
    last = life.first_column + life.dense_blocks
    return blocks[:last] + blocks[manager.dense_columns :]


def _check_counts(manager: H2OManager) -> None:
    """Assert that what is counted step by step is what the rows say."""
    lives, rows = manager.lives, manager.req_to_blocks
    held = [name for name, blocks in rows.items() if blocks]
    assert set(held) == set(manager.served)
    resident = [name for name in held if manager.is_resident(name)]
    dense = sum(lives[name].stays_dense for name in held)
    null = manager.block_pool.null_block
    in_chunks = [
        name
        for name in resident
        if lives[name].chunk and rows[name][lives[name].first_column] is not null
    ]
    count = len(resident) - len(in_chunks)
    reading = len(held) - count - dense
    assert manager.requests_by_state() == (count, reading, dense)
    blocks = [rows[name][manager.dense_columns :] for name in resident]
    assert manager.resident_blocks == sum(map(len, blocks))


def _check_request(manager: H2OManager, request_id: str) -> None:
    """Assert that a request's row has the shape that its counts imply."""
    blocks, life = manager.req_to_blocks[request_id], manager.lives[request_id]
    null = manager.block_pool.null_block
    assert manager.served.get(request_id, 0) <= manager.tokens_served(request_id)
    first, dense = life.first_column, life.dense_blocks
    assert blocks[:first] == [null] * first
    blocks = blocks[first:]
    is_resident = manager.is_resident(request_id)
    holds_dense = is_resident and blocks[0] is not null
    assert (request_id in manager.releasing) == holds_dense
    if not is_resident:
        if life.stays_dense:
            dense = cdiv(max(life.budget, life.prefill_end), manager.block_size)
        assert len(blocks) <= dense
        assert null not in blocks
        return
    columns = manager.dense_columns - first
    prompt, padding, resident = (
        blocks[:dense],
        blocks[dense:columns],
        blocks[columns:],
    )
    assert all(b is null for b in prompt) or null not in prompt
    named = [null]
    if holds_dense and life.chunk:
        named = prompt
        assert all(b.ref_cnt == 1 and b.block_hash is None for b in prompt)
    assert padding == [*islice(cycle(named), len(padding))]
    assert 0 < len(resident) <= life.budget // manager.terms.layout.block_size
    for block in resident:
        assert block.ref_cnt == 1, f"resident block {block} is shared"
        assert block.block_hash is None, f"resident block {block} is published"

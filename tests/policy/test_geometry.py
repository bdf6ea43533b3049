"""Pages that resident blocks are cut into."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.policy.geometry import BlockCut, page_slots_of


@pytest.mark.parametrize(
    ("block_size", "most", "slots"),
    [
        (16, 32, 16),
        (32, 32, 32),
        (48, 32, 16),
        (64, 32, 32),
        (128, 32, 32),
        (128, 64, 64),
        (784, 32, 16),
        (128, 0, 128),
        (16, 0, 16),
        (24, 32, 24),
    ],
)
def test_pages_fill_a_block(block_size, most, slots):
    assert page_slots_of(block_size, most) == slots


@given(
    st.integers(1, 50),
    st.integers(1, 8),
    st.integers(0, 40),
    st.lists(st.integers(0, 9)),
)
def test_pages_lie_in_their_blocks_and_apart(page, per_block, rest, blocks):
    """In bytes, words of 16: of blocks that are longer than their pages too."""
    page_bytes, block_bytes = 16 * page, 16 * (per_block * page + rest)
    cut = BlockCut.of(block_bytes, page_bytes, per_block)
    numbers = cut.pages(torch.tensor(blocks, dtype=torch.int32))
    assert numbers.dtype == torch.int32 and len(numbers) == len(blocks) * per_block
    begins = numbers.long() * cut.unit
    expected = [
        block * block_bytes + (i * page_bytes if per_block > 1 else 0)
        for block in blocks
        for i in range(per_block)
    ]
    assert begins.tolist() == expected


def test_pages_of_rows():
    cut = BlockCut.of(400, 100, 4)
    assert (cut.block_step, cut.page_step, cut.unit) == (4, 1, 100)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    assert cut.pages(table).tolist() == [
        [8, 9, 10, 11, 0, 1, 2, 3],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]
    # With a rest that no page takes: begins are what tells pages apart.
    longer = BlockCut.of(416, 96, 4)
    assert longer.unit == 32 and longer.pages(table)[1].tolist() == [
        13, 16, 19, 22, 39, 42, 45, 48,
    ]  # fmt: skip

"""Pages that resident blocks are cut into."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.geometry import (
    BlockCut,
    ResidentBlock,
    bytes_of_page,
    page_slots_of,
)


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


INT8 = H2OConfig(resident_dtype="int8")


def block_of(config, block_size, head_size, item_bytes=2):
    """A resident block, what it takes in a KV head, and what vLLM's takes."""
    block = ResidentBlock.of(config, block_size, head_size, item_bytes)
    page = bytes_of_page(config, head_size, item_bytes, block.page_slots)
    return block, block.num_pages * page, 2 * head_size * block_size * item_bytes


@given(
    st.sampled_from([16, 32, 48, 64, 128, 256, 784]),
    st.sampled_from([16, 64, 80, 128, 256]),
    st.sampled_from([2, 4]),
    st.sampled_from(["100%", "20%"]),
)
def test_int8_wastes_little(block_size, head_size, item_bytes, read):
    """Of a block less than a page is left, or what is longer is less than a page; and
    slots take less than tokens do."""
    config = H2OConfig(resident_dtype="int8", read=read)
    block, taken, stock = block_of(config, block_size, head_size, item_bytes)
    page = taken // block.num_pages
    assert block.page_slots % 16 == 0 and block.page_slots <= 64
    assert abs(taken - stock) < page
    assert page % 16 == 0, "vectors are loaded from where they are aligned"
    before, model, _ = block_of(H2OConfig(read=read), block_size, head_size, item_bytes)
    costs = [
        max(length, stock) ** 2 / cut.slots
        for cut, length in ((block, taken), (before, model))
    ]
    assert costs[0] < costs[1]


def test_the_table_of_bytes_is_what_is_taken():
    text = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    rows = re.findall(r"^\| (\d+)[^|]*\| (\d+) \|(.*)\|$", text, re.MULTILINE)
    assert len(rows) == 6
    for head_size, block_size, cells in rows:
        shape = int(block_size), int(head_size)
        (block, model, stock), (rounded, taken, _) = (
            block_of(config, *shape) for config in (H2OConfig(), INT8)
        )
        taken = max(taken, stock)
        slots_per_byte = rounded.slots / taken / (block.slots / model)
        figures = f"{stock} {model} {block.slots} {taken} {rounded.slots} "
        figures += f"{taken / model:.2f} {slots_per_byte:.2f}"
        assert cells.replace("|", " ").split() == figures.split()

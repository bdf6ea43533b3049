"""Pages in the blocks of a cache."""

import pytest
import torch

from vllm_h2o.attention.pages import Pages, clear_blocks, copy_blocks
from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import floats_of_page, state_bytes

NUM_BLOCKS, NUM_HEADS, HEAD_SIZE, BLOCK, PAGE = 5, 3, 16, 64, 16


def make(dtype, rest, fields, merges, reads_part, quantized=False, rows=False):
    """A cache as vLLM has it, and the pages of its resident blocks; rows: on CUDA."""
    item = torch.empty(0, dtype=dtype).element_size()
    floats = floats_of_page(HEAD_SIZE, PAGE, reads_part, merges)
    page = NUM_HEADS * PAGE * 2 * HEAD_SIZE * (1 if quantized else item)
    page += state_bytes(NUM_HEADS, PAGE, len(fields) + 2 * quantized, floats)
    content = NUM_HEADS * BLOCK * 2 * HEAD_SIZE * item
    per_block = -(-content // page) if quantized else BLOCK // PAGE
    block = per_block * page + rest
    raw = torch.zeros(NUM_BLOCKS * block // item, dtype=dtype)
    cache = raw.as_strided(
        (NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_SIZE),
        (block // item, BLOCK * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1),
    )
    cut = BlockCut.of(block, page, per_block)
    if rows:
        how = fields, reads_part, quantized
        pages = Pages.view_rows_cut(cache, PAGE, cut, *how)
    else:
        pages = Pages.view_cut(cache, PAGE, cut, fields, merges, reads_part, quantized)
    return raw.view(torch.uint8).view(NUM_BLOCKS, block), pages, cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [0, 192, 4096])
@pytest.mark.parametrize(
    ("fields", "merges", "reads_part", "quantized", "rows"),
    [
        (("attention",), False, False, False, False),
        (("attention", "norm"), False, True, False, False),
        (("attention",), True, False, False, False),
        (("attention",), False, False, True, False),
        (("attention", "norm"), False, True, True, False),
        (("attention",), False, False, False, True),
        (("attention",), False, False, True, True),
        (("attention",), False, True, False, True),
        (("attention",), False, True, True, True),
    ],
)
def test_what_a_page_has_is_no_other_pages(
    dtype, rest, fields, merges, reads_part, quantized, rows
):
    """Each part of each page of blocks 1 and 4 is written, and nothing of the others;
    what was written last overwrites nothing of what was written first."""
    raw, pages, cut = make(dtype, rest, fields, merges, reads_part, quantized, rows)
    numbers = cut.pages(torch.tensor([4, 1], dtype=torch.int32)).tolist()
    parts = [pages.keys, pages.values, pages.births, *pages.state.values()]
    parts += [pages.thresholds] if merges else []
    parts += [pages.key_scales, pages.value_scales] if quantized else []
    parts += [pages.bounds] if rows and reads_part else []
    values = [(part, number) for number in numbers for part in parts]
    for value, (part, number) in enumerate(values, 1):
        part[number] = value % 127 + 1
    for value, (part, number) in enumerate(values, 1):
        assert (part[number] == value % 127 + 1).all()
    touched = raw.any(dim=1).tolist()
    assert touched == [False, True, False, False, True]
    assert not raw[:, len(raw[0]) - rest :].any(), "what no page takes"


@pytest.mark.parametrize("rest", [0, 192])
def test_blocks_are_cleared_to_their_ends(rest):
    """Of those that were cut also what lies behind vLLM's part; and no other."""
    raw, pages, _ = make(torch.bfloat16, rest, ("attention",), False, False, True)
    raw.fill_(255)
    assert pages.key_scales.isnan().all()
    content = raw.view(-1).view(torch.bfloat16)
    shape = (NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_SIZE)
    strides = (len(raw[0]) // 2, BLOCK * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1)
    clear_blocks(content.as_strided(shape, strides), torch.tensor([4, 1]))
    assert raw.eq(0).all(dim=1).tolist() == [False, True, False, False, True]
    assert raw[[0, 2, 3]].eq(255).all()


@pytest.mark.parametrize("rest", [0, 192])
def test_blocks_are_copied_to_their_ends(rest):
    """One may go to where another comes from; what is no target stays."""
    raw, _, _ = make(torch.bfloat16, rest, ("attention",), False, False, True)
    raw.copy_(torch.arange(NUM_BLOCKS)[:, None].expand_as(raw))
    content = raw.view(-1).view(torch.bfloat16)
    shape = (NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_SIZE)
    strides = (len(raw[0]) // 2, BLOCK * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1)
    cache = content.as_strided(shape, strides)
    copy_blocks(cache, torch.tensor([1, 3, 4]), torch.tensor([4, 0, 2]))
    assert (raw == raw[:, :1]).all()
    assert raw[:, 0].tolist() == [3, 1, 4, 3, 1]


def test_a_page_of_its_block_is_where_it_says():
    raw, pages, cut = make(torch.float32, 0, ("attention",), False, False)
    number = cut.pages(torch.tensor([2]))[3]
    pages.keys[number, 0, 0, 0] = 1.0
    at = raw[2].view(torch.float32).nonzero().flatten().tolist()
    assert at == [3 * pages.page_bytes // 4]

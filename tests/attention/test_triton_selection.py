"""The selection in Triton and in C against torch, tie for tie."""

from dataclasses import replace

import pytest
import torch

from tests.attention.test_decode import make_cache
from tests.attention.triton_checks import (
    WITH_KERNELS,
    check_same_selection,
    check_selection,
)
from tests.attention.triton_state import DEVICE, empty_pages
from tests.pairs import in_pairs
from vllm_h2o.attention.ops import (
    Kept,
    LayerParams,
    ScoredLayer,
    cpu,
    reference,
)
from vllm_h2o.attention.ops.triton import selection
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, PlacementTable
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout, first_observer
from vllm_h2o.policy.placement import Placement
from vllm_h2o.policy.presets import PRESETS

SUM = H2OConfig(pooling=1, score="sum")
LAYOUT = SlotLayout(16, 32, 48, sinks=4, whole_blocks=False)


def check(scores, layout=LAYOUT, config=SUM):
    scores = scores.to(DEVICE)
    num_tokens = scores.shape[1]
    params = LayerParams(layout, 1.0, 0.0, config.method)
    first_query = first_observer(config, num_tokens)
    return check_both(scores, UNIFORM, first_query, config, params)


def check_both(scores, *args):
    """Return the selection in Triton; the one in C is the reference's, too."""
    *args, params = args
    expected = reference.select({"attention": scores.cpu()}, *args, params)
    # The selection asks of the pages how many heads there are, and nothing else.
    pages = Pages.view(make_cache(torch.float32, len(scores), 16, 16))
    layer = ScoredLayer(pages, {"attention": scores.cpu().contiguous()}, params)
    positions, slots = cpu.select([layer], *args).tokens[:, 0]
    check_same_selection(Kept(positions, slots), expected)
    return check_selection(scores, *args, params)


def random(num_tokens, num_kv_heads=3, distinct=None):
    generator = torch.Generator().manual_seed(num_tokens)
    if distinct is None:
        return torch.rand(num_kv_heads, num_tokens, generator=generator)
    shape = (num_kv_heads, num_tokens)
    return torch.randint(0, distinct, shape, generator=generator) / 4


# 80 fit; 81 keeps all but one; the last pass the tiles of both kernels.
@pytest.mark.parametrize(
    ("num_tokens", "pooling"),
    [(n, 15) for n in (1, 33, 79, 80, 81, 82, 137, 1041, 9001)]
    + [(n, pooling) for n in (81, 1041) for pooling in (1, 131)],
)
def test_lengths(num_tokens, pooling):
    config = H2OConfig(observation_window=8, pooling=pooling)
    check(random(num_tokens), config=config)


@pytest.mark.parametrize("distinct", [1, 2, 5])
@pytest.mark.parametrize("tile", [64, 4096])
def test_ties(monkeypatch, distinct, tile):
    """All equal and zero, two values, five: of equals the first, across tiles."""
    monkeypatch.setattr(selection, "_SELECT_TILE", tile)
    kept = check(random(701, distinct=distinct))
    if distinct == 1:
        assert kept.positions[0, :32].tolist() == [*range(32)]


def test_values_that_differ_in_their_last_bit():
    """Every digit of an image decides, and so does its sign."""
    bits = torch.arange(0x3F7FFF00, 0x3F7FFF00 + 600, dtype=torch.int32)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    close = bits.view(torch.float32)[order]
    tiny = torch.arange(600, dtype=torch.int32).view(torch.float32)[order]
    wide = torch.logspace(-38, 38, 600)[order]
    check(torch.stack([close, tiny, wide, -close, -wide]))


def test_zeros_infinities_and_no_numbers():
    scores = random(300, 5)
    scores[0] = torch.where(scores[0] < 0.5, 0.0, -0.0)
    scores[1, 100:150] = float("inf")
    scores[2] = float("nan")
    scores[3, 200:] = float("nan")
    scores[4] = -float("inf")
    check(scores)
    check(scores, config=H2OConfig(observation_window=8, pooling=3))


@pytest.mark.parametrize("heavy", [0, 4])
def test_no_competition(heavy):
    """Streaming: the sinks, if any, and a window."""
    layout = SlotLayout(16, heavy, 64 - heavy, sinks=heavy, whole_blocks=False)
    check(random(333), layout, replace(SUM, sinks=heavy, recent_ratio=1.0))


@pytest.mark.parametrize("policy", WITH_KERNELS)
def test_every_policy(policy):
    config = PRESETS[policy]
    check(random(411), SlotLayout.of_blocks(config, 16, 5), config)


@in_pairs(
    "size, more, sinks",
    [16, 48],
    [0, 1, 15, 64, 301],
    [0, 4],
)
def test_whole_blocks(size, more, sinks):
    """Also a ring block that is partly filled; sums of quarters are exact."""
    layout = SlotLayout(size, 3 * size, 2 * size, sinks, whole_blocks=True)
    config = replace(SUM, eviction_unit="block", sinks=sinks, pooling=3)
    check(random(5 * size + more, distinct=5), layout, config)


def test_whole_blocks_by_mean():
    layout = SlotLayout(16, 32, 32, 4, whole_blocks=True)
    check(random(433), layout, H2OConfig(eviction_unit="block"))


# At 63 heads have not switched, at 64 two keep all, at 112 the richest still does.
@pytest.mark.parametrize("num_tokens", [63, 64, 65, 112, 113, 500])
@pytest.mark.parametrize("distinct", [None, 3])
def test_budgets_by_head(num_tokens, distinct):
    """Each its own number of tokens, spans only for those who have room."""
    config = H2OConfig(pooling=7, observation_window=9)
    pages = empty_pages(4, 4, 64, 16, torch.float16, DEVICE)
    blocks = [2, 7, 1, 4]
    placement = Placement.of_blocks([blocks, [4, 1, 7, 4]], 4, config, 16)
    layout = SlotLayout.of_blocks(config, 16, 4)
    own = PlacementTable.of([pages, pages], layout, placement).parts()[0]
    params = LayerParams(layout, 1.0, 0.0, config.method, own)
    scores = random(num_tokens, 4, distinct).to(DEVICE)
    first_query = first_observer(config, num_tokens)
    for placement in {BY_HEAD if num_tokens > 64 else UNIFORM, BY_HEAD}:
        kept = check_both(scores, placement, first_query, config, params)
        budgets = [x.budget for x in params.layouts_of(placement, 4)]
        counts = (kept.positions >= 0).sum(dim=1).tolist()
        assert counts == [min(num_tokens, budget) for budget in budgets]


def test_rows_with_a_stride():
    """Scores of the tokens seen so far, of a longer prompt."""
    check(random(500)[:, :211])


def test_a_prompt_of_128k():
    layout = SlotLayout(16, 1328, 720, sinks=4, whole_blocks=False)
    check(random(131072, 1), layout, PRESETS["h2o"])

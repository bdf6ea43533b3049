"""What the Triton kernels must agree on with torch.

Apart from the tests, so that the GPU benchmark can check a device with them.
"""

import contextlib
from dataclasses import replace

import torch
import torch.nn.functional as F

from tests.attention.triton_state import DEVICE, bounds_of, clone, content, empty_pages
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.ops import Kept, LayerParams, ScoredLayer, reference
from vllm_h2o.attention.ops.triton import (
    batches,
    copy_kept,
    decode_resident,
    observe,
    score_by_gate,
    select,
)
from vllm_h2o.attention.placements import UNIFORM
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.layout import SlotLayout, first_observer
from vllm_h2o.policy.methods import Sum, fused_prompt_form_of
from vllm_h2o.policy.presets import PRESETS
from vllm_h2o.policy.rotation import Rotation

WITH_KERNELS = [
    name
    for name, preset in PRESETS.items()
    if fused_prompt_form_of(preset.method) is not None
]
"""Presets whose prompts the kernels read."""
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def check_step(step, num_splits=3, tile_slots=16):
    """One step of both from the same state: outputs and state agree."""
    expected, expected_pages = step.run(reference.decode_resident, "cpu")
    scratch = step.scratch(num_splits, tile_slots)
    actual, pages = step.run(decode_resident, scratch=scratch)
    torch.testing.assert_close(actual, expected, **TOLERANCE[step.query.dtype])
    torch.testing.assert_close(
        pages.attention, expected_pages.attention, rtol=1e-4, atol=1e-6, equal_nan=True
    )
    # What remains is moved, not computed: equal to the bit, also where nobody
    # may write.
    expected_pages.attention.copy_(pages.attention)
    if pages.bounds is not None:  # the reference has none
        check_bounds(step, pages)
        expected_pages.bounds.copy_(pages.bounds)
    assert torch.equal(content(pages), content(expected_pages))
    return pages


def check_bounds(step, pages):
    """Those of pages that a query may pass over are of what is in them now.

    Where a page is full with the new token its bound follows in the next step.
    """
    layout, expected = step.params.layout, pages.bounds
    scores = step.rows.positions >= step.rows.first_queries
    for row in scores.nonzero().flatten().tolist():
        position = int(step.rows.positions[row])
        of_row = pages, step.rows.block_table[row], layout, position
        expected = bounds_of(*of_row, expected)
    # A GPU rounds a product and a sum once where torch rounds both.
    off = 0.0 if DEVICE.type == "cpu" else 1e-6
    torch.testing.assert_close(
        pages.bounds, expected, rtol=off, atol=off, equal_nan=True
    )


SCALE = 0.17


def make_prompt(num_tokens, dtype=torch.float32, num_kv_heads=2, head_size=64, size=16):
    """Pages with a prompt in their dense blocks, and those blocks."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_dense = -(-num_tokens // size)
    pages = empty_pages(2 * num_dense + 2, num_kv_heads, head_size, size, dtype, DEVICE)
    blocks = (torch.randperm(2 * num_dense + 1, generator=generator) + 1).to(DEVICE)
    dense, others = blocks[:num_dense], blocks[num_dense:]
    tokens = torch.arange(num_tokens, device=DEVICE)
    at = dense[tokens // size], slice(None), tokens % size
    shape = (num_tokens, num_kv_heads, head_size)
    values = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    pages.values[at] = values
    pages.keys.transpose(2, 3)[at] = torch.randn(shape, generator=generator).to(
        DEVICE, dtype
    )
    return pages, dense, others


def make_queries(num_queries, num_heads, head_size=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_queries)
    shape = (num_queries, num_heads, head_size)
    return torch.randn(shape, generator=generator).mul(2).to(dtype).to(DEVICE)


def scoring_params(decay=1.0, softcap=0.0):
    return LayerParams(SlotLayout(16, 32, 16, 4, False), SCALE, softcap, Sum(decay))


def check_gate(prompt, num_tokens=149, rotary_dim=16):
    """Both expect the same attention of tokens whose keys are rotated in part."""
    pages, dense, _ = prompt
    heads, head_size = pages.keys.shape[1:3]
    generator = torch.Generator().manual_seed(num_tokens)
    shape = heads, num_features(head_size, head_size)
    weights = torch.randn(shape, generator=generator) / head_size**0.5
    angles = torch.randn(num_tokens, rotary_dim, generator=generator)
    gate = LayerGate(weights.to(DEVICE), Rotation(angles.to(DEVICE)), group=3)
    params = replace(scoring_params(), gate=gate)
    found = []
    for op in (reference.score_by_gate, score_by_gate):
        state = {
            "attention": torch.full((heads, num_tokens), float("nan"), device=DEVICE)
        }
        op([ScoredLayer(pages, state, params)], dense.int(), num_tokens // 2)
        found.append(state["attention"])
    expected, actual = found
    assert 0.2 < (expected > 0).float().mean() < 0.8
    error = 2e-6 * float(expected.max())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=error)


def check_scores(
    prompt, query, num_tokens, decay=1.0, softcap=0.0, scores=None, sinks=None
):
    """Both add the same to the same earlier scores, by default none."""
    pages, dense, _ = prompt
    first = num_tokens - len(query)
    if scores is None:
        scores = torch.zeros(pages.keys.shape[1], num_tokens, device=DEVICE)
    expected, params = scores.clone(), scoring_params(decay, softcap)
    params = replace(params, sink_logits=sinks)
    reference.observe(query, pages, dense, first, {"attention": expected}, params)
    observe(query, pages, dense, first, {"attention": scores}, params)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def poisoned():
    """What is allocated inside holds NaN, or the largest integer of its type."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def select_alone(scores, placement, first_query, config, params):
    """`select` of one layer; of its pages only the number of heads matters."""
    pages = empty_pages(1, len(scores), 16, 16, torch.float32, DEVICE)
    (batch,) = batches([ScoredLayer(pages, {}, params)])
    kept = select(batch, scores[None], placement, first_query, config)
    return Kept(kept.positions[0], kept.slots[0])


def copy_kept_alone(layer, source, target, placement, kept):
    """`copy_kept` of one layer."""
    (batch,), kept = batches([layer]), Kept(kept.positions[None], kept.slots[None])
    copy_kept(batch, layer.state["attention"][None], source, target, placement, kept)


def check_selection(scores, placement, first_query, config, params):
    """Both choose the same tokens for the same slots, ties included; return them."""
    expected = reference.select(
        {"attention": scores.cpu()}, placement, first_query, config, params
    )
    with poisoned():
        actual = select_alone(scores, placement, first_query, config, params)
    check_same_selection(actual, expected)
    return actual


def check_same_selection(actual, expected):
    """The same tokens and slots, with room for more at the end of each row perhaps."""
    for mine, theirs in (
        (actual.positions, expected.positions),
        (actual.slots, expected.slots),
    ):
        room = mine.shape[1] - theirs.shape[1]
        assert room >= 0 and mine.dtype == torch.int64 and mine.is_contiguous()
        assert torch.equal(mine.cpu(), F.pad(theirs, (0, room), value=-1))


def check_transition(num_tokens, config, layout, dtype=torch.float32, head_size=64):
    """The resident pages hold the selected tokens, everything else is as before."""
    size = layout.block_size
    pages, dense, others = make_prompt(num_tokens, dtype, 2, head_size, size)
    resident = others[: -(-min(num_tokens, layout.budget) // size)]
    generator = torch.Generator().manual_seed(3)
    # Few distinct scores, so that ties are drawn.
    scores = torch.randint(1, 5, (2, num_tokens), generator=generator) / 4
    scores = scores.to(DEVICE)
    params = LayerParams(layout, SCALE, 0.0, config.method)
    first_query = first_observer(config, num_tokens)
    kept = check_selection(scores, UNIFORM, first_query, config, params)
    expected = clone(pages)
    for copy, into in ((reference.copy_kept, expected), (copy_kept_alone, pages)):
        layer = ScoredLayer(into, {"attention": scores}, params)
        copy(layer, dense, resident, UNIFORM, kept)
    assert torch.equal(content(pages), content(expected))

"""What the Triton kernels must agree on with torch.

Apart from the tests, so that the GPU benchmark can check a device with them.
"""

import torch

from tests.attention.triton_state import DEVICE, clone, content, empty_pages
from vllm_h2o.attention.ops import reference
from vllm_h2o.attention.ops.triton import compress_prompt, decode_resident, observe
from vllm_h2o.policy import scores as policy_scores
from vllm_h2o.policy.layout import first_observer
from vllm_h2o.policy.selection import select_residents

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
        pages.scores, expected_pages.scores, rtol=1e-4, atol=1e-6, equal_nan=True
    )
    # What remains is moved, not computed: equal to the bit, also where nobody
    # may write.
    expected_pages.scores.copy_(pages.scores)
    assert torch.equal(content(pages), content(expected_pages))
    return pages


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


def expected_scores(query, pages, dense, first_position, num_tokens, **options):
    keys = pages.keys[dense].permute(1, 2, 0, 3).flatten(2)[:, :, :num_tokens]
    return policy_scores.observe(query, keys, first_position, **options)


def check_scores(prompt, query, num_tokens, decay=1.0, softcap=0.0, scores=None):
    pages, dense, _ = prompt
    options = {"scale": SCALE, "score_decay": decay, "softcap": softcap}
    first = num_tokens - len(query)
    earlier = {"scores": None if scores is None else scores.clone()}
    expected = expected_scores(
        query, pages, dense, first, num_tokens, **options, **earlier
    )
    actual = observe(query, pages, dense, first, **options, scores=scores)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    return actual


def check_transition(num_tokens, config, layout, dtype=torch.float32, head_size=64):
    """The resident pages hold the selected tokens, everything else is as before."""
    size = layout.block_size
    pages, dense, others = make_prompt(num_tokens, dtype, 2, head_size, size)
    resident = others[: -(-min(num_tokens, layout.budget) // size)]
    generator = torch.Generator().manual_seed(3)
    # Few distinct scores, so that ties are drawn.
    scores = torch.randint(1, 5, (2, num_tokens), generator=generator) / 4
    scores = scores.to(DEVICE)
    first_query = first_observer(config, num_tokens)
    expected = clone(pages)
    positions, slots = select_residents(scores, config, layout, first_query)
    heads = torch.arange(2, device=DEVICE)[:, None]
    i, j = positions % size, slots % size
    source, target = dense[positions // size], resident[slots // size]
    expected.keys[target, heads, :, j] = pages.keys[source, heads, :, i]
    expected.values[target, heads, j] = pages.values[source, heads, i]
    expected.scores[target, heads, j] = scores.gather(1, positions)
    expected.births[target, heads, j] = positions.int()
    compress_prompt(scores, pages, dense, resident, config, layout, first_query)
    assert torch.equal(content(pages), content(expected))

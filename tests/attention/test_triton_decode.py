"""The Triton decode step against the torch reference."""

import torch

from tests.attention.triton_state import clone, content, params_of
from vllm_h2o.attention.ops import reference
from vllm_h2o.attention.ops.triton import decode_resident

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def check_step(step, num_splits=3, tile_slots=16, **options):
    """One step of both from the same state: outputs and state agree."""
    expected_pages, pages = clone(step.pages), clone(step.pages)
    expected = step.run(reference.decode_resident, expected_pages)
    scratch = step.scratch(num_splits, tile_slots)
    actual = step.run(decode_resident, pages, scratch=scratch, **options)
    torch.testing.assert_close(actual, expected, **TOLERANCE[step.query.dtype])
    torch.testing.assert_close(
        pages.scores, expected_pages.scores, rtol=1e-4, atol=1e-6, equal_nan=True
    )
    # What remains is moved, not computed: equal to the bit, also where nobody
    # may write.
    pages.scores.zero_()
    expected_pages.scores.zero_()
    assert torch.equal(content(pages), content(expected_pages))
    return pages


def graduated(step, pages):
    """Whether each row and KV head let a token or block into its heavy set."""
    heavy = step.params.layout.heavy_slots // step.params.layout.block_size
    blocks = step.rows.block_table[:, :heavy].long()
    before, after = step.pages.births[blocks], pages.births[blocks]
    return (before != after).any(dim=3).any(dim=1)


CASES = {
    "sum": params_of(),
    "mean": params_of(mean=True),
    "decay": params_of(decay=0.9),
    "newest query only": params_of(decay=0.0, sinks=0),
    "softcap": params_of(softcap=5.0),
    "block": params_of(unit="block"),
    "block mean": params_of(unit="block", mean=True, sinks=0),
    "streaming": params_of(heavy_slots=4, recent_slots=44),
    "blocks of 32": params_of(block_size=32, heavy_slots=32, recent_slots=32),
    "blocks of 48": params_of(
        unit="block", sinks=0, block_size=48, heavy_slots=48, recent_slots=48
    ),
}

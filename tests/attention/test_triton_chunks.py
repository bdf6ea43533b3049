"""Reading on in Triton's copies of what is held against the torch reference."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.attention.triton_heads import CONFIG, make_layers, params_of
from tests.attention.triton_state import DEVICE, clone, content, empty_pages
from vllm_h2o.attention.ops import Chunk, ScoredLayer, reference, triton
from vllm_h2o.attention.placements import BY_HEAD
from vllm_h2o.policy.methods import Sum

SIZE, HEAD_SIZE, GROUP = 16, 64, 3
STEPS = 100, 120, 150
IN_TURN = torch.tensor([4, 1, 5, 2, 0] * 2, dtype=torch.int32)
"""Dense blocks of a chunk of 50 tokens, by position."""


def read_on(kernels, device, layer, dtype, grown_at, **how):
    """Attention of a chunk's steps, and all layers once it is compressed."""
    layers, table = make_layers(dtype, HEAD_SIZE, SIZE, 1)
    own = [clone(pages, device) for pages in layers]
    params = replace(params_of(own, layer, SIZE, **how), group=GROUP)
    model = torch.float32 if dtype == torch.int8 else dtype
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(3))
    dense = empty_pages(6, 2, HEAD_SIZE, SIZE, model)
    for part in (dense.keys, dense.values):
        part.copy_(random(part.shape))
    dense = clone(dense, device)
    start, end = STEPS[0], STEPS[-1]
    chunk = Chunk(
        start, end, end - 24, start - 32, end - 24, IN_TURN.to(device),
        table[0].to(device), BY_HEAD, grown_at,
    )  # fmt: skip
    state, outputs = {}, []
    for first, last in zip(STEPS, STEPS[1:], strict=False):
        query = random((last - first, 2 * GROUP, HEAD_SIZE)).to(model).to(device)
        output = torch.full_like(query, float("nan"))
        kernels.read_on(query, first, dense, own[layer], chunk, state, params, output)
        outputs.append(output.cpu())
    kernels.compress_chunk(
        [ScoredLayer(own[layer], state, params, dense)], chunk, CONFIG
    )
    return torch.cat(outputs), [clone(pages, "cpu") for pages in own], layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("grown_at", [0, 90, 100])
def test_equals_reference(layer, dtype, grown_at):
    """In pages of other layers, of heads that are full, and whose budget has grown."""
    how = {"softcap": 5.0, "method": Sum(0.9)} if layer == 1 else {}
    case = layer, dtype, grown_at
    expected, their_layers, _ = read_on(reference, "cpu", *case, **how)
    actual, our_layers, before = read_on(triton, DEVICE, *case, **how)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    parts = ["keys", "values", "births", "attention"]
    if dtype == torch.int8:
        parts += ["key_scales", "value_scales"]
    for ours, theirs in zip(our_layers, their_layers, strict=True):
        for name in parts:
            torch.testing.assert_close(
                getattr(ours, name), getattr(theirs, name), equal_nan=True
            )
    wrote = [
        not torch.equal(content(mine), content(theirs))
        for mine, theirs in zip(our_layers, before, strict=True)
    ]
    assert wrote[layer] and any(wrote[:layer] + wrote[layer + 1 :]) == (layer != 2)

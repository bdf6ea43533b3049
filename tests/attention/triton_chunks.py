"""Chunks that are read beside what is held, on a device and by the reference.

Used by the tests and, on a GPU, by `python -m benchmarks.gpu`.
"""

import contextlib
import functools
from dataclasses import replace

import torch

from tests.attention.triton_checks import TOLERANCE
from tests.attention.triton_heads import CONFIG, make_layers, params_of
from tests.attention.triton_state import DEVICE, clone, content, empty_pages
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.ops import Chunk, Held, ScoredLayer, reference, triton
from vllm_h2o.attention.ops.chunks import most_held
from vllm_h2o.attention.placements import BY_HEAD
from vllm_h2o.policy.methods import Sum
from vllm_h2o.policy.reach import MovingKeys, Reach

SIZE, HEAD_SIZE, GROUP = 16, 64, 3
HEAD_SIZES = 80, 64, 64
"""By layer."""
STEPS = 100, 120, 150
IN_TURN = torch.tensor([4, 1, 5, 2, 0] * 2, dtype=torch.int32)
"""Dense blocks of a chunk of 50 tokens, by position."""
NOWHERE = contextlib.nullcontext()


def read_on(kernels, device, layer, dtype, grown_at, inside=NOWHERE, **how):
    """Attention of a chunk's steps, and all layers once it is compressed."""
    head_size = HEAD_SIZES[layer]
    layers, table = make_layers(dtype, head_size, SIZE, 1)
    own = [clone(pages, device) for pages in layers]
    params = replace(params_of(own, layer, SIZE, **how), group=GROUP)
    model = torch.float32 if dtype == torch.int8 else dtype
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(3))
    dense = empty_pages(6, 2, head_size, SIZE, model)
    for part in (dense.keys, dense.values):
        part.copy_(random(part.shape))
    dense = clone(dense, device)
    start, end = STEPS[0], STEPS[-1]
    chunk = Chunk(
        end, end - 24, start - 32, end - 24, IN_TURN.to(device),
        Held(table[0].to(device), BY_HEAD, start, grown_at),
    )  # fmt: skip
    params.device_tables  # noqa: B018  Made when a layer is bound.
    state, outputs = {}, []
    for first, last in zip(STEPS, STEPS[1:], strict=False):
        query = random((last - first, 2 * GROUP, head_size)).to(model).to(device)
        output = torch.full_like(query, float("nan"))
        with inside:
            kernels.read_on(
                query, first, dense, own[layer], chunk, state, params, output
            )
        outputs.append(output.cpu())
    kernels.compress_chunk(
        [ScoredLayer(own[layer], state, params, dense)], chunk, CONFIG
    )
    return torch.cat(outputs), [clone(pages, "cpu") for pages in own], layers


def moving(device):
    frequencies = 0.7 ** torch.arange(HEAD_SIZE // 2).double()
    return MovingKeys(Reach(limit=40, step=20, chunk=20), frequencies.to(device), True)


def check_reading_on(layer, dtype, grown_at):
    """A chunk that is read beside what heads hold, and its end, with the reference."""
    how = {"softcap": 5.0, "method": Sum(0.9)} if layer == 1 else {}
    moves = layer == 2 and dtype != torch.int8
    sinks = torch.linspace(-2, 6, 2 * GROUP) if layer == 0 else None
    theirs, ours = (
        how
        | ({"moving": moving(device)} if moves else {})
        | ({} if sinks is None else {"sink_logits": sinks.to(device)})
        for device in ("cpu", DEVICE)
    )
    case = layer, dtype, grown_at
    expected, their_layers, _ = read_on(reference, "cpu", *case, **theirs)
    actual, our_layers, before = read_on(triton, DEVICE, *case, **ours)
    # The kernel multiplies in the model's type, as vLLM's do; an error of a sum is of
    # the size of its parts.
    off = TOLERANCE[expected.dtype]["atol"] * max(1, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=off)
    _check_pages(our_layers, their_layers)
    wrote = [
        not torch.equal(content(mine), content(theirs))
        for mine, theirs in zip(our_layers, before, strict=True)
    ]
    assert wrote[layer] and any(wrote[:layer] + wrote[layer + 1 :]) == (layer != 2)


def end_chunk(kernels, device, dtype, method, gated, grown_at, inside=NOWHERE):
    """All layers once a chunk is compressed, of heads by the gate or attention."""
    layers, table = make_layers(dtype, HEAD_SIZE, SIZE, 1)
    own = [clone(pages, device) for pages in layers]
    model = torch.float32 if dtype == torch.int8 else dtype
    generator = torch.Generator().manual_seed(5)
    random = functools.partial(torch.randn, generator=generator)
    start, end = STEPS[0], STEPS[-1]
    chunk = Chunk(
        end, end - 24, start - 32, end - 24, IN_TURN.to(device),
        Held(table[0].to(device), BY_HEAD, start, grown_at),
    )  # fmt: skip
    scored = []
    for layer, pages in enumerate(own):
        dense = empty_pages(6, 2, HEAD_SIZE, SIZE, model)
        for part in (dense.keys, dense.values):
            part.copy_(random(part.shape))
        weights = random((2, 2 * HEAD_SIZE + 4)).to(device) / HEAD_SIZE
        gate = LayerGate(weights, None, GROUP) if gated else None
        params = params_of(own, layer, SIZE, method=method, gate=gate)
        params = replace(params, group=GROUP)
        if layer and dtype != torch.int8:  # the first one's keys have no rotation
            params = replace(params, moving=moving(device))
        most = most_held(chunk.held, 2, params)
        # Few levels: scores tie.
        attention = (random((2, most + end - start)).abs() * 4).round() / 4
        attention[0, -20] = float("nan")
        state = {"attention": attention.to(device)}
        scored.append(ScoredLayer(pages, state, params, clone(dense, device)))
    config = replace(CONFIG, pooling=1 if gated else 3)
    with inside:
        kernels.compress_chunk(scored, chunk, config)
    return [clone(pages, "cpu") for pages in own]


def check_chunk_end(dtype, method, gated, grown_at):
    """The end of a chunk of all layers at once, with the reference's."""
    case = dtype, method, gated, grown_at
    expected, actual = (
        end_chunk(kernels, device, *case)
        for kernels, device in ((reference, "cpu"), (triton, DEVICE))
    )
    _check_pages(actual, expected)


def _check_pages(actual, expected):
    parts = ["keys", "values", "births", "attention"]
    if actual[0].quantized:
        parts += ["key_scales", "value_scales"]
    for ours, theirs in zip(actual, expected, strict=True):
        for name in parts:
            torch.testing.assert_close(
                getattr(ours, name), getattr(theirs, name), equal_nan=True
            )

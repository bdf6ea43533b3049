"""Reading on in Triton's copies of what is held against the torch reference."""

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.triton_checks import TOLERANCE
from tests.attention.triton_heads import BLOCKS, CONFIG, make_layers, params_of
from tests.attention.triton_state import DEVICE, clone, content, empty_pages
from tests.pairs import in_pairs
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.ops import Chunk, Held, ScoredLayer, reference, triton
from vllm_h2o.attention.ops.chunks import most_held
from vllm_h2o.attention.ops.triton import (
    chunk_end_bytes,
    chunks,
    move_bytes,
    read_bytes,
    reading_on,
)
from vllm_h2o.attention.placements import BY_HEAD
from vllm_h2o.policy.methods import Mean, Sum
from vllm_h2o.policy.reach import MovingKeys, Reach

SIZE, HEAD_SIZE, GROUP = 16, 64, 3
HEAD_SIZES = 80, 64, 64
"""By layer."""
STEPS = 100, 120, 150
IN_TURN = torch.tensor([4, 1, 5, 2, 0] * 2, dtype=torch.int32)
"""Dense blocks of a chunk of 50 tokens, by position."""
NOWHERE = contextlib.nullcontext()


class Allocated(TorchDispatchMode):
    """Bytes of what is made inside, as if none of it were let go."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        theirs = [x.untyped_storage()._cdata for x in args if torch.is_tensor(x)]
        if torch.is_tensor(result):
            mine = result.untyped_storage()
            self.num_bytes += 0 if mine._cdata in theirs else mine.nbytes()
        return result


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


def move_keys(kernels, device, layer, dtype, grown_at):
    """All layers, before and after the keys of one have moved."""
    layers, table = make_layers(dtype, HEAD_SIZE, SIZE, 1)
    own = [clone(pages, device) for pages in layers]
    params = replace(params_of(own, layer, SIZE), moving=moving(device))
    held = Held(table[0].to(device), BY_HEAD, 100, grown_at)
    kernels.move_keys([ScoredLayer(own[layer], {}, params)], held)
    return layers, [clone(pages, "cpu") for pages in own]


def moving(device):
    frequencies = 0.7 ** torch.arange(HEAD_SIZE // 2).double()
    return MovingKeys(Reach(limit=40, step=20, chunk=20), frequencies.to(device), True)


@in_pairs(
    "dtype, layer, grown_at",
    [torch.float32, torch.bfloat16],
    [0, 1, 2],
    [0, 100],
)
def test_keys_move_as_in_the_reference(layer, dtype, grown_at):
    """And nothing else does; in pages of other layers too."""
    case = layer, dtype, grown_at
    before, expected = move_keys(reference, "cpu", *case)
    _, actual = move_keys(triton, DEVICE, *case)
    moved = 0
    for mine, theirs, old in zip(actual, expected, before, strict=True):
        off = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            mine.keys, theirs.keys, rtol=off, atol=off, equal_nan=True
        )
        moved += int((theirs.keys.nan_to_num() != old.keys.nan_to_num()).any(2).sum())
        for part in ("values", "births", "attention"):
            for pages in (mine, theirs):
                same = getattr(pages, part), getattr(old, part)
                torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True)
    assert moved > 10


@in_pairs(
    "dtype, layer, grown_at",
    [torch.float32, torch.bfloat16, torch.int8],
    [0, 1, 2],
    [0, 90, 100],
)
def test_equals_reference(layer, dtype, grown_at):
    """In pages of other layers, of heads that are full, and whose budget has grown."""
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


class Launches:
    """Counts launches of a kernel in Triton's interpreter."""

    def __init__(self, monkeypatch, *kernels):
        self.count = 0
        for kernel in kernels:
            monkeypatch.setattr(kernel, "run", self._counted(kernel.run))

    def _counted(self, run):
        def counted(*args, **kwargs):
            self.count += 1
            return run(*args, **kwargs)

        return counted


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


@in_pairs(
    "dtype, method, gated, grown_at, budget",
    [torch.float16, torch.int8],
    [Mean(), Sum(0.9)],
    [False, True],
    [0, 90, 100],
    [1, 2**26],
)
def test_layers_end_a_chunk_together(
    monkeypatch, dtype, method, gated, grown_at, budget
):
    """In one launch of a kind, or in as many as the scratch is small."""
    monkeypatch.setattr("vllm_h2o.attention.ops.triton.layers.SCRATCH_BYTES", budget)
    launches = Launches(monkeypatch, chunks.held_kernel)
    case = dtype, method, gated, grown_at
    expected, actual = (
        end_chunk(kernels, device, *case)
        for kernels, device in ((reference, "cpu"), (triton, DEVICE))
    )
    parts = ["keys", "values", "births", "attention"]
    if dtype == torch.int8:
        parts += ["key_scales", "value_scales"]
    for ours, theirs in zip(actual, expected, strict=True):
        for name in parts:
            torch.testing.assert_close(
                getattr(ours, name), getattr(theirs, name), equal_nan=True
            )
    assert launches.count == 2 * (3 if budget == 1 else 1)


def test_memory_is_counted(monkeypatch):
    """Of two steps of a chunk of 50 tokens, with its state that stays."""
    inside = Allocated()
    monkeypatch.setattr(type(reading_on.read_kernel), "run", lambda *_, **__: None)
    alone = SimpleNamespace(read_on=triton.read_on, compress_chunk=lambda *_: None)
    read_on(alone, DEVICE, 1, torch.bfloat16, 0, inside=inside, softcap=5.0)
    most, size = max(BLOCKS[1]) * SIZE, (2 * GROUP, 2, HEAD_SIZE, 2)
    state = 4 * 2 * (most + 50)
    steps = (read_bytes(most + 50, n, *size) for n in (20, 30))
    assert 0.6 < inside.num_bytes / (sum(steps) + state) <= 1


@pytest.mark.parametrize("gated", [False, True])
def test_memory_of_a_chunks_end_is_counted(gated):
    """Of all layers at once, what is alive at most."""
    profile = torch.profiler.profile(profile_memory=True)
    end_chunk(triton, DEVICE, torch.float16, Mean(), gated, 0, profile)
    alive, most = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    held = max(map(max, BLOCKS)) * SIZE
    counted = len(BLOCKS) * chunk_end_bytes(held, held + 50, 2, HEAD_SIZE, 2)
    assert 0.8 < most / (counted + move_bytes(held, HEAD_SIZE)) <= 1

"""Reading on in Triton's copies of what is held against the torch reference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.triton_chunks import (
    GROUP,
    HEAD_SIZE,
    SIZE,
    check_chunk_end,
    check_reading_on,
    end_chunk,
    moving,
    read_on,
)
from tests.attention.triton_heads import BLOCKS, make_layers, params_of
from tests.attention.triton_state import DEVICE, clone
from tests.pairs import in_pairs
from vllm_h2o.attention.ops import Held, ScoredLayer, reference, triton
from vllm_h2o.attention.ops.triton import (
    chunk_end_bytes,
    chunks,
    move_bytes,
    read_bytes,
    reading_on,
)
from vllm_h2o.attention.placements import BY_HEAD
from vllm_h2o.policy.methods import Mean, Sum


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


def move_keys(kernels, device, layer, dtype, grown_at):
    """All layers, before and after the keys of one have moved."""
    layers, table = make_layers(dtype, HEAD_SIZE, SIZE, 1)
    own = [clone(pages, device) for pages in layers]
    params = replace(params_of(own, layer, SIZE), moving=moving(device))
    held = Held(table[0].to(device), BY_HEAD, 100, grown_at)
    kernels.move_keys([ScoredLayer(own[layer], {}, params)], held)
    return layers, [clone(pages, "cpu") for pages in own]


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
    check_reading_on(layer, dtype, grown_at)


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
    check_chunk_end(dtype, method, gated, grown_at)
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

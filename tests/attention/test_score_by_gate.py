"""The gate's scores of a prompt's tokens: the kernels in C and Triton against torch."""

from dataclasses import replace

import pytest
import torch

from tests.attention.test_decode import (
    THREADS,
    make_cache,
    pages_of,
    params_of,
    threads,
)
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.ops import ScoredLayer, cpu, reference, triton
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.rotation import Rotation

HEADS, GROUP = 2, 3
PROMPT = torch.tensor([1, 20, 5, 14, 2, 9, 22, 17, 4, 12], dtype=torch.int32)


def rotation(rotary_dim, neox=True, base=1e4, positions=200):
    """By the formula of RoPE, as vLLM's modules tabulate it."""
    speeds = base ** -(torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    angles = torch.arange(positions)[:, None] * speeds
    return Rotation(torch.cat([angles.cos(), angles.sin()], dim=1), neox)


def scores_of(op, dtype, head_size, block_size, num_tokens, rotations):
    """`[layers, HEADS, num_tokens]`, of pages of NaN but for the prompt's tokens."""
    generator = torch.Generator().manual_seed(num_tokens)
    layers = []
    for turned in rotations:
        params = params_of()
        pages = pages_of(make_cache(dtype, HEADS, head_size, block_size), params)
        for t in range(num_tokens):
            block, slot = PROMPT[t // block_size], t % block_size
            # Of very different lengths, some of them 0.
            lengths = torch.randint(0, 40, (2, HEADS, 1), generator=generator) / 4
            kv = torch.randn(2, HEADS, head_size, generator=generator) * lengths
            pages.keys[block, :, :, slot], pages.values[block, :, slot] = kv.to(dtype)
        shape = HEADS, num_features(head_size, head_size)
        # Features are of size 1, so that this is of both signs.
        weights = torch.randn(shape, generator=generator) / head_size**0.5
        gate = LayerGate(weights, turned, GROUP)
        state = {"attention": torch.full((HEADS, num_tokens), float("nan"))}
        layers.append(ScoredLayer(pages, state, replace(params, gate=gate)))
    op(layers, PROMPT, num_tokens // 2)
    return torch.stack([layer.state["attention"] for layer in layers])


def check(dtype, head_size, block_size, num_tokens, rotations):
    """The same but for the order of sums, which shows where they come to little."""
    shape = dtype, head_size, block_size, num_tokens, rotations
    expected = scores_of(reference.score_by_gate, *shape)
    assert num_tokens == 1 or 0.2 < (expected > 0).float().mean() < 0.8
    error = 2e-6 * float(expected.max())
    for number in THREADS:
        with threads(number):
            actual = scores_of(cpu.score_by_gate, *shape)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=error)
    actual = scores_of(triton.score_by_gate, *shape)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 33, 160])
def test_prompts(dtype, num_tokens):
    """Shorter than a page, whole pages, a part of the last; layers that differ."""
    check(dtype, 64, 16, num_tokens, [rotation(64), rotation(64, base=1e6), None])


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize("head_size", [16, 80, 512])
def test_sizes(block_size, head_size):
    """Of pages and heads, which are multiples of 16."""
    check(torch.bfloat16, head_size, block_size, 150, [rotation(head_size)])


def test_ways_to_rotate():
    """Neighbours in pairs, a part of the key, in the keys' type, not known, too far."""
    narrow = Rotation(rotation(64).angles.bfloat16())
    ways = [rotation(64, neox=False), rotation(16), rotation(32, False), narrow]
    ways += [Rotation(None), rotation(64, positions=159), ways[0]]
    check(torch.bfloat16, 64, 16, 160, ways)


@pytest.mark.parametrize("start", [16, 37, 150])
def test_tokens_from_within_a_block_on(start):
    """As those of the whole prompt."""
    shape = torch.float32, 32, 16, 160, [rotation(32)]
    expected = scores_of(reference.score_by_gate, *shape)[0]

    def fill(layers, blocks, first_query):
        (layer,) = layers
        found = layer.state["attention"]
        layer.params.gate.fill(
            found[:, start:], layer.pages, blocks, first_query, start
        )

    actual = scores_of(fill, *shape)[0, :, start:]
    torch.testing.assert_close(actual, expected[:, start:], rtol=1e-5, atol=1e-6)

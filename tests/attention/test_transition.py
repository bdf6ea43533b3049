"""The transition of all layers on CPU against the torch reference, layer by layer."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from tests.attention.test_decode import (
    THREADS,
    make_cache,
    pages_of,
    params_of,
    placements_of,
    threads,
)
from tests.pairs import in_pairs
from vllm_h2o.attention.ops import Held, ResidentRows, ScoredLayer, cpu, reference
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM
from vllm_h2o.policy.config import H2OConfig

BLOCKS = [[2, 5, 1], [5, 1, 3], [2, 3, 5]]
"""Of three layers of three heads; 3 blocks of 16 on average."""
BUDGET = 48
KERNELS = [(reference, 1), *((cpu, number) for number in THREADS)]
TABLE = torch.tensor([7, 3, 11], dtype=torch.int32)
PROMPT = torch.tensor([1, 20, 5, 14, 2, 9, 22, 17, 4, 12], dtype=torch.int32)


def make_layers(
    dtype, blocks, num_tokens, params, by_head, dense_size=None, quantized=False
):
    """Layers full of tokens, but for NaN in what no prompt and no request has.

    Their prompts are in pages of `dense_size`, if that is given.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    held = [*TABLE.tolist(), *PROMPT.tolist()]
    caches = [make_cache(dtype, 3, 64, 16) for _ in blocks]
    pages = [pages_of(cache, params, quantized) for cache in caches]
    layers = []
    for i, mine in enumerate(pages):
        parts = [mine.keys, mine.values]
        for part in parts + [mine.key_scales, mine.value_scales] * quantized:
            content = torch.randn(part[held].shape, generator=generator)
            part[held] = (content * (40 if part.dtype == torch.int8 else 1)).to(
                part.dtype
            )
        # Few distinct scores, so that ties are drawn.
        scores = torch.randint(1, 9, (3, num_tokens), generator=generator) / 4
        mine.births.fill_(-1)
        constants = params
        if by_head:
            constants = replace(params, placements=placements_of(pages, i, blocks))
        dense = None
        if dense_size:
            dense = Pages.view_dense(make_cache(dtype, 3, 64, dense_size))
            for part in (dense.keys, dense.values):
                part.copy_(torch.randn(part.shape, generator=generator))
        layers.append(ScoredLayer(mine, {"attention": scores}, constants, dense))
    return layers


def placement_of(num_tokens, source, by_head):
    """Own ones for those that fill the budget: their prompt does, or they part."""
    return BY_HEAD if by_head and (num_tokens > BUDGET or source is TABLE) else UNIFORM


def check(
    num_tokens,
    source,
    config,
    dtype=torch.float32,
    by_head=True,
    dense_size=None,
    quantized=False,
    **how,
):
    """Every byte of every layer is the same afterwards."""
    params = params_of(mean=True, unit=config.eviction_unit, sinks=config.sinks, **how)
    results = []
    for kernel, number in KERNELS:
        layers = make_layers(
            dtype, BLOCKS, num_tokens, params, by_head, dense_size, quantized
        )
        placement = placement_of(num_tokens, source, by_head)
        with threads(number):
            held = Held(TABLE, placement, num_tokens)
            kernel.transition(layers, source, held, num_tokens // 2, config)
        results.append([layer.pages for layer in layers])
    expected_pages, *kernels = results
    pairs = [zip(expected_pages, pages, strict=True) for pages in kernels]
    for expected, actual in chain(*pairs):
        scales = ("key_scales", "value_scales") * quantized
        for name in ("keys", "values", "attention", "births", *scales):
            torch.testing.assert_close(
                getattr(actual, name), getattr(expected, name),
                rtol=0, atol=0, equal_nan=True, msg=name,
            )  # fmt: skip


@in_pairs(
    "dtype, num_tokens, by_head",
    [torch.float32, torch.bfloat16, torch.float16],
    [1, 17, 48, 49, 80, 81, 160],
    [True, False],
)
@pytest.mark.rule("R2")
def test_a_prompt(dtype, num_tokens, by_head):
    """Shorter than a page, at the budget, beyond that of the richest head."""
    config = H2OConfig(sinks=4, pooling=3)
    check(num_tokens, PROMPT, config, dtype, by_head)


@in_pairs(
    "dtype, dense_size, option",
    [torch.float32, torch.bfloat16, torch.float16],
    [16, 48, 64],
    [{}, {"merge": True}, {"quantized": True}],
)
def test_a_prompt_in_pages_of_another_size(dtype, dense_size, option):
    """Those that vLLM has laid out, in its type."""
    config = H2OConfig(sinks=4, pooling=3)
    check(150, PROMPT, config, dtype, dense_size=dense_size, **option)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
def test_switch_to_head_budgets_in_place(dtype, quantized):
    """Sources are overwritten; rich heads keep all, where they are."""
    config = H2OConfig(sinks=4, pooling=3)
    check(BUDGET, TABLE, config, dtype, quantized=quantized)


def test_whole_blocks():
    config = H2OConfig(sinks=4, eviction_unit="block", pooling=1)
    check(160, PROMPT, config, by_head=False)


@in_pairs(
    "dtype, option, by_head, num_tokens",
    [torch.float32, torch.bfloat16],
    ["read", "merge"],
    [True, False],
    [17, 40, 80, 160],
)
def test_what_the_next_token_finds_of_a_prompt(dtype, option, by_head, num_tokens):
    """A page's bound is there when the prompt is, and keys' lengths are."""
    check_next_token(dtype, option, by_head, num_tokens, PROMPT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", ["read", "merge"])
def test_what_the_next_token_finds_when_heads_have_switched(dtype, option):
    check_next_token(dtype, option, True, BUDGET, TABLE)


def check_next_token(dtype, option, by_head, num_tokens, source):
    sinks = 4 if by_head else 0  # one page to choose in that of 3 blocks; two
    params = params_of(
        mean=True, sinks=sinks, **{option: 0.3 if option == "read" else True}
    )
    config = H2OConfig(sinks=sinks, pooling=3)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 9, 64, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 3, 64, generator=generator).to(dtype)
    first_query = torch.tensor([num_tokens // 2])
    placement = placement_of(num_tokens, source, by_head)
    rows = ResidentRows(
        TABLE[None],
        torch.tensor([num_tokens]),
        first_query,
        placements=torch.tensor([placement], dtype=torch.int32),
    )
    results = []
    for kernel, number in KERNELS:
        layers = make_layers(dtype, BLOCKS, num_tokens, params, by_head)
        found = [torch.full_like(query, float("nan")) for _ in layers]
        with threads(number):
            held = Held(TABLE, placement, num_tokens)
            kernel.transition(layers, source, held, num_tokens // 2, config)
            for layer, output in zip(layers, found, strict=True):
                kernel.decode_resident(
                    query, key, value, layer.pages, rows, layer.params, output
                )
        if option == "merge":
            found += [layer.pages.values[TABLE.long()] for layer in layers]
            found += [layer.pages.thresholds[TABLE[0]] for layer in layers]
        results.append(torch.cat([part.float().flatten() for part in found]))
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    expected, *kernels = results
    for actual in kernels:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 4)

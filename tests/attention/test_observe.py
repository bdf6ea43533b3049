"""Every kernel that scores prompts against the torch reference."""

from dataclasses import replace

import pytest
import torch

from tests.attention.test_decode import SINKS, make_cache, params_of
from tests.pairs import in_pairs
from vllm_h2o.attention.ops import cpu, reference
from vllm_h2o.attention.pages import Pages

NUM_BLOCKS = 24
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def make_prompt(num_tokens, heads, head_size=64, block_size=16, dtype=torch.float32):
    """Queries of all tokens, and their keys in pages that are NaN elsewhere."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_heads, num_kv_heads = heads
    pages = Pages.view(make_cache(dtype, num_kv_heads, head_size, block_size))
    order = torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1
    blocks = order[: -(-num_tokens // block_size)].int()
    positions = torch.arange(num_tokens)
    shape = (num_tokens, num_kv_heads, head_size)
    keys = torch.randn(shape, generator=generator).to(dtype)
    pages.keys[blocks[positions // block_size].long(), :, :, positions % block_size] = (
        keys
    )
    # Rows of a larger tensor, as vLLM's projection of q, k and v gives them.
    wide = torch.randn(
        num_tokens, (num_heads + 2) * head_size, generator=generator
    ).mul(2)
    query = wide.to(dtype)[:, : num_heads * head_size]
    return query.unflatten(1, (num_heads, head_size)), pages, blocks


def scores_of(op, prompt, first_query, params, chunks=()):
    """Observe from `first_query` on, in steps that end before the chunks' tokens."""
    query, pages, blocks = prompt
    num_tokens = len(query)
    scores = torch.zeros(pages.keys.shape[1], num_tokens)
    bounds = [first_query, *chunks, num_tokens]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        held = blocks[: -(-stop // pages.block_size)]
        op(query[start:stop], pages, held, start, {"attention": scores}, params)
    return scores


def check(prompt, first_query, params, chunks=(), **close):
    expected = scores_of(reference.observe, prompt, first_query, params, chunks)
    actual = scores_of(cpu.observe, prompt, first_query, params, chunks)
    torch.testing.assert_close(actual, expected, **(CLOSE | close))
    return actual


CASES = {
    "accumulate": params_of(),
    "decay": params_of(decay=0.9),
    "newest query only": params_of(decay=0.0),
    "softcap": params_of(softcap=3.0),
    "sinks": params_of(),
}


def with_sinks(name, num_heads):
    """The case, with sinks of as many heads where it is theirs."""
    params = CASES[name]
    return replace(params, sink_logits=SINKS[:num_heads]) if name == "sinks" else params


@in_pairs(
    "name, heads, window",
    CASES,
    [(9, 3), (4, 4), (8, 1), (10, 2)],
    [1, 7, 64],
)
def test_window(name, heads, window):
    num_tokens = 149
    params = with_sinks(name, heads[0])
    check(make_prompt(num_tokens, heads), num_tokens - window, params)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 97, 353])
def test_all_queries(num_tokens):
    """Every query gives each of its heads a mass of one."""
    scores = check(make_prompt(num_tokens, (6, 2)), 0, CASES["accumulate"])
    torch.testing.assert_close(scores.sum(), torch.tensor(num_tokens * 6.0))


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize("head_size", [16, 80, 128])
def test_sizes(block_size, head_size):
    prompt = make_prompt(300, (6, 2), head_size, block_size)
    check(prompt, 260, CASES["accumulate"])


def test_rows_that_outgrow_the_scratch():
    """Long enough for several tiles of rows, whatever their number of queries."""
    prompt = make_prompt(2900, (5, 1), 16, 128)
    check(prompt, 2000, replace(CASES["decay"], scale=0.4))


@pytest.mark.parametrize("name", CASES)
def test_window_that_spans_chunks(name):
    prompt, params = make_prompt(170, (9, 3)), with_sinks(name, 9)
    in_parts = check(prompt, 70, params, chunks=(71, 96, 97, 160))
    at_once = scores_of(cpu.observe, prompt, 70, params)
    torch.testing.assert_close(in_parts, at_once, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 112])
def test_half_precision(dtype, head_size):
    """Both compute in float32 from the same halves, so no looser than float32."""
    prompt = make_prompt(131, (6, 2), head_size, dtype=dtype)
    check(prompt, 100, CASES["accumulate"])


def test_threads_give_the_same_scores_in_every_run():
    prompt, params = make_prompt(353, (9, 3)), CASES["accumulate"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        first = check(prompt, 200, params)
        for _ in range(5):
            assert torch.equal(scores_of(cpu.observe, prompt, 200, params), first)
    finally:
        torch.set_num_threads(before)


@in_pairs(
    "dtype, heads, scoring",
    [torch.float32, torch.bfloat16, torch.float16],
    [(9, 3), (4, 4), (8, 1)],
    [40, 7, 1],
)
def test_attending_in_the_same_pass(scoring, heads, dtype):
    """Queries before the window attend only; outputs are slices of a larger tensor."""
    first, num_tokens = 109, 149
    prompt = make_prompt(num_tokens, heads, 80, dtype=dtype)
    query, pages, blocks = with_values(prompt)
    queries, skipped = query[first:], num_tokens - first - scoring
    for name in ("decay", "softcap", "sinks"):
        params = with_sinks(name, heads[0])
        results = []
        for op in (reference.attend_observed, cpu.attend_observed):
            scores = torch.rand(heads[1], num_tokens, generator=torch.manual_seed(1))
            output = torch.full((num_tokens - first, 2 * heads[0], 80), float("nan"))
            output = output.to(dtype)[:, heads[0] :]
            state = {"attention": scores}
            op(queries, pages, blocks, first, skipped, state, params, output)
            results.append((output, scores))
        (expected, expected_scores), (actual, scores) = results
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(actual, expected, **close)
        torch.testing.assert_close(scores, expected_scores, **CLOSE)


@pytest.mark.parametrize("threads", [1, 3])
def test_attending_in_tiles(threads):
    """More rows than the scratch holds, pages that only the last of them see."""
    query, pages, blocks = with_values(make_prompt(2900, (5, 1), 16, 128))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        expected, actual = torch.empty(2, 900, 5, 16)
        scores = torch.zeros(2, 1, 2900)
        arguments = (query[2000:], pages, blocks, 2000, 0)
        states = [{"attention": mine} for mine in scores]
        reference.attend_observed(*arguments, states[0], params_of(), expected)
        cpu.attend_observed(*arguments, states[1], params_of(), actual)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*scores, **CLOSE)


def with_values(prompt):
    """The prompt with values beside its keys, NaN still where no token is."""
    query, pages, blocks = prompt
    generator = torch.Generator().manual_seed(2)
    positions = torch.arange(len(query))
    block, i = (
        blocks[positions // pages.block_size].long(),
        positions % pages.block_size,
    )
    at = block, slice(None), i
    values = torch.randn(pages.values[at].shape, generator=generator)
    pages.values[at] = values.to(pages.values.dtype)
    return prompt


def test_unsupported_dtype_is_named():
    query, pages, blocks = make_prompt(20, (4, 2))
    state = {"attention": torch.zeros(2, 20)}
    with pytest.raises(ValueError, match="--dtype"):
        cpu.observe(query.double(), pages, blocks, 0, state, CASES["decay"])

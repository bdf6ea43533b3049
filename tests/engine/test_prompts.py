"""Prefix caching and chunked prefill change nothing about what survives."""

import pytest
import torch

import vllm_h2o
from tests.engine.helpers import (
    BLOCK_SIZE,
    MODELS,
    add,
    assert_pool_whole,
    check,
    engine,
    generate,
    greedy,
    model_named,
    outcome,
    scheduler,
)
from tests.engine.tiny_models import random_prompts, save_llama
from vllm_h2o.policy.presets import PRESETS

pytestmark = pytest.mark.engine

WINDOW = PRESETS["h2o"].observation_window
OPTIONS = {"h2o_budget": 256, "max_num_batched_tokens": 2048}
SHARED, TAIL, NUM_TOKENS = 512, 150, 32


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return model_named(request.param)


@pytest.fixture(scope="module")
def plain(model):
    """Prefix caching off, a prompt in one chunk."""
    with model.engine(kv_policy="h2o", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def cached(model):
    with model.engine(kv_policy="h2o", enable_prefix_caching=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def siblings(model):
    """Prompts that share a long prefix."""
    prefix, *tails = model.prompts(SHARED, TAIL, TAIL, WINDOW - 12)
    return [prefix + tail for tail in tails]


@pytest.mark.rule("R22")
def test_prefix_hits_give_the_result_of_a_cold_cache(plain, cached, siblings):
    """Tokens and survivors: a greedy answer forgives a wrong one of these."""
    expected = [outcome(plain, prompt, NUM_TOKENS) for prompt in siblings]
    computed = []
    for prompt, result in zip(siblings, expected, strict=True):
        request_steps = watch_prefill(cached)
        assert outcome(cached, prompt, NUM_TOKENS) == result
        computed.append(request_steps())
    # The first request computes everything, the others not the shared prefix,
    # but for what the observation window needs.
    assert computed[0] == len(siblings[0])
    assert computed[1] == len(siblings[1]) - SHARED
    reach = (len(siblings[2]) - WINDOW) // BLOCK_SIZE * BLOCK_SIZE
    assert computed[2] == len(siblings[2]) - min(SHARED, reach)
    # The same prompt again: its own blocks hit, up to the window.
    request_steps = watch_prefill(cached)
    assert outcome(cached, siblings[0], NUM_TOKENS) == expected[0]
    reach = (len(siblings[0]) - WINDOW) // BLOCK_SIZE * BLOCK_SIZE
    assert request_steps() == len(siblings[0]) - reach
    assert_pool_whole(cached)


def test_a_request_within_the_budget_takes_all_hits(model, plain, cached):
    (prompt,) = model.prompts(256 - NUM_TOKENS)
    (expected,) = generate(plain, [prompt], NUM_TOKENS)
    assert generate(cached, [prompt], NUM_TOKENS)[0] == expected
    request_steps = watch_prefill(cached)
    assert generate(cached, [prompt], NUM_TOKENS)[0] == expected
    assert request_steps() == BLOCK_SIZE
    assert_pool_whole(cached)


def test_the_next_turn_finds_the_answer_where_nothing_could_be_evicted(
    model, plain, cached
):
    prompt, question = model.prompts(100, 20)
    (answer,) = generate(cached, [prompt], NUM_TOKENS)
    turn = prompt + answer + question
    expected = generate(plain, [turn], NUM_TOKENS)
    request_steps = watch_prefill(cached)
    assert generate(cached, [turn], NUM_TOKENS) == expected
    # The last token of an answer is never computed.
    known = (len(prompt) + NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert request_steps() == len(turn) - known
    assert_pool_whole(cached)


def test_a_block_is_hit_in_the_step_that_fills_it(model, plain, cached):
    """By a prompt that goes on from an answer: what stays dense is published as stock's
    is, before its token has been written."""
    prompt, question = model.prompts(103, 20)
    (answer,) = generate(plain, [prompt], NUM_TOKENS)
    known = 4 * BLOCK_SIZE
    turn = (prompt + answer)[:known] + question
    parameters = greedy(4, logprobs=0, flat_logprobs=True)
    (expected,) = plain.generate([{"prompt_token_ids": turn}], parameters)
    engine_, found = cached.llm_engine, {}
    add(cached, "answered", prompt, NUM_TOKENS)
    for _ in range(known - len(prompt)):  # the next fills the block
        engine_.step()
    engine_.add_request("turn", {"prompt_token_ids": turn}, parameters)
    request_steps = watch_prefill(cached)
    while engine_.has_unfinished_requests():
        found |= {output.request_id: output for output in engine_.step()}
    assert request_steps() == len(turn) - known, "it hits what is filled in its step"
    assert list(found["answered"].outputs[0].token_ids) == answer
    actual, expected = found["turn"].outputs[0], expected.outputs[0]
    assert actual.token_ids == expected.token_ids
    ours, theirs = (list(x.logprobs.logprobs) for x in (actual, expected))
    assert ours == pytest.approx(theirs, abs=1e-4)


def watch_prefill(llm):
    """Return a function that tells the prompt tokens computed since."""
    counted = []
    original = scheduler(llm).schedule

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        counted.extend(
            row.num_scheduled_tokens
            for row in output.h2o_plan.rows.values()
            if not row.decodes
        )
        return output

    scheduler(llm).schedule = schedule

    def computed():
        scheduler(llm).schedule = original
        return sum(counted)

    return computed


@pytest.mark.rule("R8")
def test_shared_blocks_are_never_modified(cached, siblings):
    engine_, manager = cached.llm_engine, scheduler(cached).h2o_managers[0]
    add(cached, "first", siblings[0], 80)
    engine_.step()
    (first,) = (blocks for blocks in manager.req_to_blocks.values() if blocks)
    prefix = [block.block_id for block in first[: SHARED // BLOCK_SIZE]]
    before = cached.collective_rpc("probe_checksums", args=(prefix,))
    add(cached, "second", siblings[1], 80)
    add(cached, "third", siblings[2], 50)
    shared = 0
    while engine_.has_unfinished_requests():
        engine_.step()
        check(cached)
        counts = [manager.block_pool.blocks[i].ref_cnt for i in prefix]
        shared = max(shared, max(counts))
    assert shared > 1, "no block was ever shared"
    assert cached.collective_rpc("probe_checksums", args=(prefix,)) == before
    assert_pool_whole(cached)


@pytest.mark.parametrize("window", ["64", '"all"'])
def test_chunks_give_the_survivors_of_one_chunk(model, plain, window):
    settings = f'{{"budget": 256, "observation_window": {window}}}'
    plain.collective_rpc("probe_set_policy", args=(settings,))
    prompt = model.prompts(467)[0]
    results = {}
    # 233: two chunks and a last one of a single token.
    for chunk in (2048, 233, 64, 33):
        scheduler(plain).max_num_scheduled_tokens = chunk
        results[chunk] = outcome(plain, prompt, 32)
    scheduler(plain).max_num_scheduled_tokens = 2048
    one_chunk = results.pop(2048)
    for chunk, result in results.items():
        assert result == one_chunk, f"chunks of {chunk}"


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(),
    reason="with AMX stock's own logits depend on how many tokens a chunk has",
)
def test_in_16_bits_no_answer_depends_on_chunks_or_hits(model):
    """Bit by bit, where the last steps mostly score and the first ones do not."""
    options = OPTIONS | {"h2o_observation_window": 64, "dtype": "bfloat16"}
    prompt, other = model.prompts(467, 467)
    with model.engine(kv_policy="h2o", enable_prefix_caching=True, **options) as llm:
        expected = thoughts(llm, prompt)
        # Of a chunk of one token stock's own logits are others on some CPUs (AVX-512);
        # in float32 one is above.
        for chunk in (232, 64, 33):
            scheduler(llm).max_num_scheduled_tokens = chunk
            assert thoughts(llm, prompt) == expected, f"chunks of {chunk}"
        scheduler(llm).max_num_scheduled_tokens = 2048
        first = [thoughts(llm, each, prompt_logprobs=None) for each in (prompt, other)]
        request_steps = watch_prefill(llm)
        again = [thoughts(llm, each, prompt_logprobs=None) for each in (prompt, other)]
        assert request_steps() < 2 * 467 / 2
        assert again == first
        assert_pool_whole(llm)


def thoughts(llm, prompt, prompt_logprobs=1):
    """Log-probabilities of a prompt's tokens, if asked for, and of the first token."""
    parameters = greedy(2, logprobs=4, prompt_logprobs=prompt_logprobs)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    said = [*(output.prompt_logprobs or [])[1:], output.outputs[0].logprobs[0]]
    return [{i: token.logprob for i, token in each.items()} for each in said]


def test_chunks_in_layout_vec16_give_stock_tokens_where_nothing_is_evicted(tmp_path):
    """vLLM lays out the cache so on CPU for head sizes that 32 does not divide."""
    model, prompts = save_llama(tmp_path, head_dim=80), random_prompts(64, 333, 900)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256}
    probe = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
    with engine(model, **probe, **options) as llm:
        expected = generate(llm, prompts, NUM_TOKENS)
    assert max(len(set(tokens)) for tokens in expected) > 10
    with engine(model, kv_policy="h2o", h2o_budget=1024, **options) as llm:
        assert llm.collective_rpc("probe_layout") == ["vec16"]
        assert generate(llm, prompts, NUM_TOKENS) == expected
        assert vllm_h2o.stats(llm)["transitions"] == 0
        # These could outgrow the budget, so that they are copied, but end before.
        for i, prompt in enumerate(prompts):
            add(llm, f"r{i}", prompt, 1024)
        requests = list(scheduler(llm).requests.values())
        while min(request.num_output_tokens for request in requests) < NUM_TOKENS:
            llm.llm_engine.step()
        tokens = [list(request.output_token_ids[:NUM_TOKENS]) for request in requests]
        assert tokens == expected
        stats = vllm_h2o.stats(llm)
        assert (stats["transitions"], stats["tokens_evicted"]) == (3, 0)
        llm.llm_engine.abort_request(["r0", "r1", "r2"])
        llm.llm_engine.step()
        assert_pool_whole(llm)

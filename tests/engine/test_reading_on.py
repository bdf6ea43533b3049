"""Prompts that are read in chunks: an engine against the rules written down densely."""

import functools

import pytest
from vllm.v1.request import Request, RequestStatus

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    SMOLLM2_HEADS,
    add,
    assert_equal_densely,
    assert_pool_whole,
    engine,
    greedy,
    pool,
    prompts_of,
    scheduler,
)
from tests.reference.dense_h2o import DenseLlama, Sizes, Variant, generate
from tests.reference.heads import MovingHead
from tests.reference.sizes import sizes_of_heads
from vllm_h2o.policy.profile import HeadProfile

pytestmark = pytest.mark.engine

BLOCK, BUDGET, CHUNK, NUM_TOKENS = 32, 64, 160, 12
COMMON = Sizes(BUDGET // 2, BUDGET // 2, BLOCK)
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_budget": BUDGET,
    "h2o_recent_ratio": 0.5,
    "h2o_observation_window": 48,
    "h2o_prefill_chunk": CHUNK,
    "h2o_keep": "end",
    "max_model_len": 512,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 15,
    "h2o_head_budgets": str(SMOLLM2_HEADS),
    "h2o_positions": "cache",
    "hf_overrides": {"max_position_embeddings": 480},
}
# Of 480 tokens that the model would have been trained for.
STEP, LIMIT = 80, 240


@pytest.mark.rule("R19")
def test_engine_equals_reference():
    """By head, beside each other, in steps shorter than a chunk: of prompts of several
    chunks, whose last is short, or whole; of one that is no longer than a chunk. In a
    pool that holds none of the longest prompts, and after a preemption."""
    model, prompts = DenseLlama(ensure_model()), prompts_of(393, 320, 140)
    head_class = functools.partial(MovingHead, model, STEP, LIMIT)
    variant = Variant(48, 15, "mean", "token")
    profile = HeadProfile.load(SMOLLM2_HEADS)
    own = [
        sizes_of_heads(profile, BUDGET, BLOCK, 512, len(prompt), NUM_TOKENS)
        for prompt in prompts
    ]
    assert own[0] != own[2], "all are of one class of lengths"
    expected = [
        generate(
            model, prompt, NUM_TOKENS, [variant], COMMON, sizes,
            chunk=CHUNK if len(prompt) > CHUNK else None, head_class=head_class,
        )[0]
        for prompt, sizes in zip(prompts, own, strict=True)
    ]  # fmt: skip
    with engine(ensure_model(), **OPTIONS) as llm:
        assert pool(llm).num_gpu_blocks < -(-512 // BLOCK), (
            "less than a prompt may have"
        )
        for _ in range(2):
            assert_equal_densely(llm, prompts, expected)
        _assert_goes_on(llm, model, expected, prompts, (variant, COMMON, own))
        _assert_session_goes_on(llm, model, expected[0], prompts[0], (variant, own[0]))
        _assert_full_session_ends(llm, prompts[2])
        llm.collective_rpc("probe_watch")
        add(llm, "preempted", prompts[0], NUM_TOKENS)
        for _ in range(4):  # in its second chunk
            llm.llm_engine.step()
        scheduler(llm).reset_prefix_cache(reset_running_requests=True)
        finished = []
        while llm.llm_engine.has_unfinished_requests():
            finished += [x for x in llm.llm_engine.step() if x.finished]
        assert [*finished[0].outputs[0].token_ids] == expected[0].tokens
        (survivors,) = llm.collective_rpc("probe_survivors")[0].values()
        kept = [[head.survivors() for head in layer] for layer in expected[0].heads]
        assert survivors == kept
        assert_pool_whole(llm)


def _assert_session_goes_on(llm, model, before, prompt, rules):
    """The next turn of streaming input, which drops the last token of the one before
    it."""
    variant, own = rules
    core = llm.llm_engine.engine_core.engine_core
    more = prompts_of(300)[0][200:260]
    result = generate(
        model, prompt + before.tokens[:-1] + more, NUM_TOKENS, [variant], COMMON, own,
        chunk=CHUNK, before=before,
    )[0]  # fmt: skip
    for tokens in (prompt, more):
        parameters = greedy(NUM_TOKENS, extra_args={"h2o": {"continue": True}})
        parameters.update_from_generation_config({}, eos_token_id=2)
        turn = Request(
            "session", [*tokens], parameters, None,
            block_hasher=core.request_block_hasher, resumable=True,
        )  # fmt: skip
        core.scheduler.add_request(turn)
        session = core.scheduler.requests["session"]
        llm.collective_rpc("probe_watch")
        while not core.scheduler.num_waiting_for_streaming_input:
            core.step()
    assert result.margin > 1e-3, "it meets a tie: take another"
    assert [*session.output_token_ids] == result.tokens
    (survivors,) = llm.collective_rpc("probe_survivors")[0].values()
    assert survivors == [[head.survivors() for head in x] for x in result.heads]
    assert core.scheduler.h2o_managers[0].lives["session"].start == (
        len(prompt) + NUM_TOKENS - 1
    )
    scheduler(llm).finish_requests("session", RequestStatus.FINISHED_ABORTED)
    core.step()


def _assert_full_session_ends(llm, prompt):
    """Its turns could be more together than what the model was trained for."""
    core = llm.llm_engine.engine_core.engine_core
    ends = []
    for resumable in (True, False):
        parameters = greedy(2, extra_args={"h2o": {"policy": "full"}})
        parameters.update_from_generation_config({}, eos_token_id=2)
        request = Request(
            "full", [*prompt], parameters, None, resumable=resumable,
            block_hasher=core.request_block_hasher,
        )  # fmt: skip
        core.scheduler.add_request(request)
        while not request.is_finished():
            core.step()
        ends.append(request.status)
    too_long, in_time = ends
    assert too_long is RequestStatus.FINISHED_ERROR
    assert in_time is RequestStatus.FINISHED_LENGTH_CAPPED


def _assert_goes_on(llm, model, expected, prompts, rules):
    """The next turns of conversations go on from what the last ones have held: of one
    chunk, and of two; and of one of them once more, as another may want it too."""
    variant, common, own = rules
    more = prompts_of(300)[0][100:]
    for which, length in ((0, 90), (2, 200), (0, 90)):
        turn = prompts[which] + expected[which].tokens + more[:length]
        result = generate(
            model, turn, NUM_TOKENS, [variant], common, own[which], chunk=CHUNK,
            before=expected[which],
        )  # fmt: skip
        before = scheduler(llm).h2o_stats.continued_tokens
        assert_equal_densely(llm, [turn], result, [{"continue": True}])
        gone_on = scheduler(llm).h2o_stats.continued_tokens - before
        assert gone_on == len(prompts[which]) + NUM_TOKENS - 1
    # A turn with another answer than was given goes on from the end of the prompt.
    assert_equal_densely(llm, prompts[:1], expected[:1], [{"keep": "prompt"}])
    before = generate(
        model, prompts[0], 1, [variant], common, own[0], chunk=CHUNK,
        head_class=functools.partial(MovingHead, model, STEP, LIMIT),
    )[0]  # fmt: skip
    turn = prompts[0] + more[50:110]
    result = generate(
        model, turn, NUM_TOKENS, [variant], common, own[0], chunk=CHUNK, before=before
    )
    before = scheduler(llm).h2o_stats.continued_tokens
    assert_equal_densely(llm, [turn], result, [{"continue": True}])
    assert scheduler(llm).h2o_stats.continued_tokens - before == len(prompts[0])
    assert_pool_whole(llm)

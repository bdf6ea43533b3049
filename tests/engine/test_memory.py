"""What a request holds, what comes back, and how many fit."""

import pytest

import vllm_h2o
from tests.engine.helpers import (
    BLOCK_SIZE,
    MODELS,
    add,
    assert_pool_whole,
    check,
    engine,
    generate,
    model_named,
    outcome,
    pool,
    scheduler,
)
from tests.engine.tiny_models import random_prompts, save_llama

pytestmark = pytest.mark.engine

BUDGET = 256
PROMPT_TOKENS, NUM_TOKENS = 2000, 1000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights: where counts are compared, and no answers."""
    folder = tmp_path_factory.mktemp("llama")
    return save_llama(folder, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def llm(tiny):
    options = {"max_model_len": 4096, "skip_tokenizer_init": True}
    with engine(tiny, kv_policy="h2o", h2o_budget=BUDGET, **options) as llm:
        yield llm


def held(llm):
    return pool(llm).num_gpu_blocks - 1 - pool(llm).get_num_free_blocks()


@pytest.mark.rule("R3")
def test_request_holds_its_budget_however_long(llm):
    resident, dense_blocks = BUDGET // BLOCK_SIZE, -(-PROMPT_TOKENS // BLOCK_SIZE)
    before = vllm_h2o.stats(llm)
    add(llm, "long", random_prompts(PROMPT_TOKENS)[0], NUM_TOKENS)
    request = next(iter(scheduler(llm).requests.values()))
    while request.num_output_tokens == 0:
        llm.llm_engine.step()
    assert held(llm) == dense_blocks + resident
    blocks_by_step = set()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        if request.num_output_tokens % 50 == 0:
            check(llm)
        if llm.llm_engine.has_unfinished_requests():
            blocks_by_step.add(held(llm))
    assert request.num_output_tokens == NUM_TOKENS
    assert blocks_by_step == {resident}
    assert_pool_whole(llm)
    stats = vllm_h2o.stats(llm)
    assert stats["transitions"] - before["transitions"] == 1
    # The last sampled token is never computed.
    total = PROMPT_TOKENS + NUM_TOKENS - 1
    assert stats["tokens_evicted"] - before["tokens_evicted"] == total - BUDGET
    assert stats["blocks_freed"] - before["blocks_freed"] == dense_blocks


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.rule("R23")
def test_abort_gives_everything_back(llm, steps):
    for i, prompt in enumerate(random_prompts(300, 150, 700)):
        add(llm, f"abort-{steps}-{i}", prompt, 100)
    for _ in range(steps):
        llm.llm_engine.step()
        check(llm)
    assert held(llm) > 0
    names = [f"abort-{steps}-{i}" for i in range(3)]
    llm.llm_engine.abort_request(names)
    llm.llm_engine.step()
    assert not llm.llm_engine.has_unfinished_requests()
    assert_pool_whole(llm)


def count_preemptions(llm):
    """Count the preemptions of an engine from now on."""
    preempted = []
    original = scheduler(llm)._preempt_request

    def counting(request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler(llm)._preempt_request = counting
    return preempted


def test_sixteen_requests_in_the_memory_of_four(tiny, capsys):
    max_model_len = 512
    options = {
        "model": tiny,
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "num_gpu_blocks_override": 4 * max_model_len // BLOCK_SIZE + 1,
    }
    prompts = random_prompts(*[60] * 16)
    counts = {}
    for name, h2o in {
        "stock": {},
        "h2o": {"kv_policy": "h2o", "h2o_budget": 64},
    }.items():
        if not h2o:
            options |= {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
        else:
            options.pop("worker_extension_cls")
        with engine(**options, **h2o) as llm:
            preempted = count_preemptions(llm)
            tokens = generate(llm, prompts, 200)
            assert [len(t) for t in tokens] == [200] * 16
            assert_pool_whole(llm)
            counts[name] = len(preempted)
    with capsys.disabled():
        print(f"\npreemptions, 16 requests in the memory of 4: {counts}")
    assert counts["stock"] > 0
    assert counts["h2o"] == 0


def test_preempted_requests_finish_and_leak_nothing(tiny):
    budget, max_model_len, num_tokens = 256, 512, 200
    smallest_pool = (max_model_len + budget) // BLOCK_SIZE
    with engine(
        tiny,
        skip_tokenizer_init=True,
        kv_policy="h2o",
        h2o_budget=budget,
        max_model_len=max_model_len,
        num_gpu_blocks_override=smallest_pool + 1,
        enable_prefix_caching=True,
    ) as llm:
        preempted = count_preemptions(llm)
        for i, prompt in enumerate(random_prompts(60, 60, 90, 130, 60, 200)):
            add(llm, f"r{i}", prompt, num_tokens)
        lengths = {}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            check(llm)
        assert set(lengths.values()) == {num_tokens} and len(lengths) == 6
        assert len(preempted) > 0
        assert vllm_h2o.stats(llm)["preemptions"] == len(preempted)
        assert vllm_h2o.stats(llm)["transitions"] >= 6 + len(preempted) // 2
        assert_pool_whole(llm)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return model_named(request.param)


@pytest.fixture(
    scope="module",
    params=[
        {},
        pytest.param({"h2o_read": "50%"}, marks=pytest.mark.slow),
        pytest.param({"h2o_merge": "value"}, marks=pytest.mark.slow),
        {"kv_policy": "cake"},
        {"kv_policy": "d2o"},
        {"kv_policy": "gate", "h2o_head_budgets": "measure"},
    ],
    ids=str,
)
def tight(model, request):
    """A pool of which a prompt of 700 tokens takes three quarters: a preempted request
    gets blocks back that it had, for something else."""
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 41} | request.param
    with model.engine(**{"kv_policy": "h2o", "h2o_budget": BUDGET} | options) as llm:
        yield llm


def run_until_preempted(llm, prompt, num_tokens, moment):
    """Preempt a request once; its tokens until then and after, and its survivors."""
    llm.collective_rpc("probe_watch")
    before = vllm_h2o.stats(llm)["preemptions"]
    add(llm, "preempted", prompt, num_tokens)
    (request,) = scheduler(llm).requests.values()
    while not moment(request):
        assert llm.llm_engine.has_unfinished_requests()
        llm.llm_engine.step()
    known = list(request.output_token_ids)
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    assert held(llm) == 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        check(llm)
    (survivors,) = llm.collective_rpc("probe_survivors")[0].values()
    assert vllm_h2o.stats(llm)["preemptions"] == before + 1
    assert_pool_whole(llm)
    return known, list(request.output_token_ids[len(known) :]), survivors


@pytest.mark.parametrize("generated", [1, 40])
@pytest.mark.rule("R16")
def test_a_preempted_resident_goes_on_as_if_all_its_tokens_were_a_prompt(
    model, tight, generated
):
    """After one token its transition, which is left to the next step, is due still."""
    (prompt,), num_tokens = model.prompts(700), 80
    known, tokens, survivors = run_until_preempted(
        tight, prompt, num_tokens, lambda r: r.num_output_tokens == generated
    )
    assert len(known) == generated
    fresh = outcome(tight, prompt + known, num_tokens - generated)
    assert (tokens, survivors) == fresh


def test_preempted_between_the_chunks_of_a_prompt_it_scores_once(
    model, tight, monkeypatch
):
    """Of the 32 queries that score, 31 have when all starts again."""
    (prompt,), num_tokens = model.prompts(700), 40
    expected = outcome(tight, prompt, num_tokens)
    monkeypatch.setattr(scheduler(tight), "max_num_scheduled_tokens", 233)
    known, *result = run_until_preempted(
        tight, prompt, num_tokens, lambda r: r.num_computed_tokens == 3 * 233
    )
    assert known == []
    assert tuple(result) == expected


def test_pool_too_small_for_one_request_is_refused():
    options = {"max_model_len": 512, "num_gpu_blocks_override": 20}
    with (
        pytest.raises(ValueError, match="max seq len"),
        engine(kv_policy="h2o", h2o_budget=256, **options),
    ):
        pass

"""What single requests ask for, in one engine, as in engines that have it for all."""

import pytest
from vllm.exceptions import VLLMValidationError

import vllm_h2o
from tests.engine.helpers import (
    MODELS,
    answers,
    assert_pool_whole,
    check,
    generate,
    greedy,
    model_named,
    outcome,
    scheduler,
)

pytestmark = pytest.mark.engine

NUM_TOKENS, WINDOW = 24, 100
OPTIONS = {"max_num_batched_tokens": 256, "max_model_len": 1024}
STOCK = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
H2O = {"kv_policy": "h2o", "h2o_budget": 128, "h2o_prompt_score": "attention"}
FULL = {"extra_args": {"h2o": {"policy": "full"}}}
OWN_WINDOW = {"extra_args": {"h2o": {"observation_window": WINDOW}}}
NOTHING: dict = {}
WISHES = [FULL, NOTHING, OWN_WINDOW, FULL, OWN_WINDOW, NOTHING]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return model_named(request.param)


@pytest.fixture(scope="module")
def prompts(model):
    first, *others = model.prompts(300, 420, 550, 40, 420, 600)
    # The last shares its first tokens with the first, whose blocks it may take.
    return [first, *others[:-1], first[:256] + others[-1][:300]]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Tokens of each by an engine that does for all what it asks, nothing beside it."""
    tokens = {}

    def each(llm, asks):
        for i, wish in enumerate(WISHES):
            if wish is asks:
                (tokens[i],) = generate(llm, [prompts[i]], NUM_TOKENS)

    with model.engine(**STOCK, **OPTIONS) as llm:
        each(llm, FULL)
        (first,) = llm.generate(*logged(prompts[0]), use_tqdm=False)
    with model.engine(**H2O, **OPTIONS) as llm:
        each(llm, NOTHING)
    with model.engine(**H2O, h2o_observation_window=WINDOW, **OPTIONS) as llm:
        each(llm, OWN_WINDOW)
        own = outcome(llm, prompts[2], NUM_TOKENS)
    tokens = [tokens[i] for i in range(len(WISHES))]
    return {"tokens": tokens, "logprobs": first.outputs[0].logprobs, "own": own}


@pytest.fixture(scope="module")
def mixed(model, alone):
    """After the others have gone: they share what is one in a process."""
    with model.engine(**H2O, enable_prefix_caching=True, **OPTIONS) as llm:
        yield llm


def logged(prompt, **options):
    """A prompt, and parameters that give log-probabilities."""
    return [{"prompt_token_ids": prompt}], greedy(NUM_TOKENS, logprobs=5, **options)


def test_side_by_side_each_answers_as_alone(mixed, alone, prompts):
    """Cold, and with prefix hits; in chunks, whose steps decodes share."""
    parameters = [greedy(NUM_TOKENS, **wish) for wish in WISHES]
    assert answers(mixed, prompts, parameters) == alone["tokens"]
    assert vllm_h2o.stats(mixed)["transitions"] == 4
    assert answers(mixed, prompts, parameters) == alone["tokens"]
    assert_pool_whole(mixed)


def test_preempted_ones_too(mixed, alone, prompts):
    """A full one is read again to its end, and still nothing of it is evicted."""
    before = vllm_h2o.stats(mixed)["transitions"]
    for i, (prompt, wish) in enumerate(zip(prompts, WISHES, strict=True)):
        if wish is FULL:
            mixed.llm_engine.add_request(
                str(i), {"prompt_token_ids": prompt}, greedy(NUM_TOKENS, **wish)
            )
    done, steps = {}, 0
    while mixed.llm_engine.has_unfinished_requests():
        for output in mixed.llm_engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
        steps += 1
        check(mixed)
        if steps == 20:
            scheduler(mixed).reset_prefix_cache(reset_running_requests=True)
    assert done == {i: alone["tokens"][i] for i in done} and len(done) == 2
    stats = vllm_h2o.stats(mixed)
    assert stats["transitions"] == before and stats["preemptions"] == 2


def test_a_full_request_is_stocks_to_the_bit(mixed, alone, prompts):
    (output,) = mixed.generate(*logged(prompts[0], **FULL), use_tqdm=False)
    assert output.outputs[0].logprobs == alone["logprobs"]


def test_a_window_of_its_own_decides_what_survives(mixed, alone, prompts):
    mixed.collective_rpc("probe_watch")
    (tokens,) = answers(mixed, prompts[2:3], greedy(NUM_TOKENS, **OWN_WINDOW))
    (survivors,) = mixed.collective_rpc("probe_survivors")[0].values()
    assert (tokens, survivors) == alone["own"]
    assert outcome(mixed, prompts[2], NUM_TOKENS)[1] != survivors


@pytest.mark.parametrize(
    "wishes, said",
    [
        ({"h2o": {"policy": "half"}}, "h2o_policy of this request is 'half'"),
        ({"h2o_windows": 3}, "use .*h2o_observation_window"),
    ],
)
def test_a_bad_wish_is_refused_and_nothing_else(mixed, alone, prompts, wishes, said):
    parameters = [greedy(NUM_TOKENS, **wish) for wish in WISHES]
    parameters[-1] = greedy(NUM_TOKENS, extra_args=wishes)
    with pytest.raises(VLLMValidationError, match=said):
        answers(mixed, prompts, parameters)
    assert answers(mixed, prompts[:2], parameters[:2]) == alone["tokens"][:2]
    assert_pool_whole(mixed)

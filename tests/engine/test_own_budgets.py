"""Budgets of single requests, side by side, as in engines that have them for all."""

import pytest
from vllm.exceptions import VLLMValidationError

import vllm_h2o
from tests.engine.helpers import (
    MODELS,
    add,
    answers,
    assert_pool_whole,
    check,
    greedy,
    model_named,
    outcome,
    scheduler,
)

pytestmark = pytest.mark.engine

NUM_TOKENS, BUDGET = 24, 256
OPTIONS = {"max_num_batched_tokens": 256, "max_model_len": 1024}
ASKED = [64, 128, None, "25%", 64]
BUDGETS = [64, 128, 256, 128, 64]
FULL = {"h2o": {"policy": "full"}}
UNIFORM = {"kv_policy": "h2o", "h2o_head_budgets": "uniform"}
BY_REQUEST = {"kv_policy": "cake"}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return model_named(request.param)


@pytest.fixture(scope="module")
def prompts(model):
    """Of the fourth and its answer 25 % are 116 tokens; the last fits its budget, which
    its answer outgrows, and is the beginning of the first."""
    first, *others = model.prompts(300, 420, 550, 440)
    return [first, *others, first[:50]]


@pytest.fixture(
    scope="module",
    params=[
        {"kv_policy": "h2o"},
        pytest.param(UNIFORM, marks=pytest.mark.slow),
        BY_REQUEST,
    ],
)
def options(request):
    """Heads with budgets by a profile, alike, and by each request's attention."""
    return OPTIONS | request.param


@pytest.fixture(scope="module")
def alone(model, options, prompts):
    """Tokens and survivors of each in an engine of its budget, nothing beside it."""
    found = {}
    for budget in (64, 128, BUDGET):
        with model.engine(**options, h2o_budget=budget) as llm:
            for i, mine in enumerate(BUDGETS):
                if mine == budget:
                    found[i] = outcome(llm, prompts[i], NUM_TOKENS)
            if budget == 64:
                found["goes on"] = {
                    known: outcome(llm, prompt, NUM_TOKENS - known)
                    for known in (10,)
                    for prompt in [prompts[0] + found[0][0][:known]]
                }
    return found


@pytest.fixture(scope="module")
def mixed(model, alone, options):
    """After the others have gone: they share what is one in a process."""
    options = options | {"h2o_budget": BUDGET, "enable_prefix_caching": True}
    with model.engine(**options) as llm:
        yield llm


def wishes(asked):
    return {} if asked is None else {"extra_args": {"h2o": {"budget": asked}}}


def outcomes(llm, prompts):
    """Of all in one batch, with a full request among them."""
    parameters = [greedy(NUM_TOKENS, **wishes(asked)) for asked in ASKED]
    parameters.insert(1, greedy(NUM_TOKENS, extra_args=FULL))
    together = [prompts[0], prompts[2], *prompts[1:]]
    for asks in parameters[::2]:
        asks.extra_args = {**(asks.extra_args or {}), "h2o_report": True}
    llm.collective_rpc("probe_watch")
    inputs = [{"prompt_token_ids": prompt} for prompt in together]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    held = llm.collective_rpc("probe_survivors")[0]
    # The full one has none; the others were numbered as they were given.
    survivors = [
        held[name] for name in sorted(held, key=lambda n: int(n.split("-")[0]))
    ]
    reports = [output.kv_transfer_params for output in outputs]
    assert reports[1::2] == [None] * 3
    for report, held in zip(reports[::2], (64, 128, 128), strict=True):
        assert report["h2o"]["budget"] == report["h2o"]["tokens_held"] == held
    return [*zip(tokens[:1] + tokens[2:], survivors, strict=True)]


@pytest.mark.rule("R14")
def test_side_by_side_each_is_as_alone(mixed, alone, prompts):
    """Cold, and with prefix hits; in chunks, whose steps decodes share."""
    expected = [alone[i] for i in range(len(ASKED))]
    assert outcomes(mixed, prompts) == expected
    assert vllm_h2o.stats(mixed)["transitions"] == len(ASKED)
    assert outcomes(mixed, prompts) == expected
    assert_pool_whole(mixed)


def test_a_preempted_one_keeps_its_budget(mixed, alone, prompts):
    """Beside one of the engine's budget, which is preempted with it."""
    ((known, fresh),) = alone["goes on"].items()
    mixed.collective_rpc("probe_watch")
    llm = mixed.llm_engine
    llm.add_request(
        "small", {"prompt_token_ids": prompts[0]}, greedy(NUM_TOKENS, **wishes(64))
    )
    small = next(r for r in scheduler(mixed).requests.values())
    add(mixed, "plain", prompts[2], NUM_TOKENS)
    while small.num_output_tokens < known:
        llm.step()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    tokens = []
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished and output.request_id == "small":
                tokens = list(output.outputs[0].token_ids)
        check(mixed)
    held = mixed.collective_rpc("probe_survivors")[0]
    (survivors,) = [held[name] for name in held if name.startswith("small")]
    assert (tokens[known:], survivors) == fresh
    assert_pool_whole(mixed)


@pytest.mark.parametrize(
    "asked, said", [(BUDGET + 1, "use 256 or less"), (0, "use a number of token")]
)
def test_what_can_not_be_is_refused(mixed, prompts, asked, said):
    with pytest.raises(VLLMValidationError, match=f"h2o_budget.* {asked}.*{said}"):
        answers(mixed, prompts[4:], greedy(4, **wishes(asked)))
    assert_pool_whole(mixed)


def test_a_number_is_split_over_heads_for_the_length_of_each_request():
    """As by an engine whose longest request is of the class's length: 2048, 1448, 1024,
    724, 512 tokens."""
    model = model_named("random weights")
    short, long = model.prompts(600, 1800)
    number = {"kv_policy": "h2o", "h2o_budget": BUDGET}
    with model.engine(**number, max_model_len=2048) as llm:
        found = [outcome(llm, prompt, NUM_TOKENS) for prompt in (short, long, short)]
    assert found[0] == found[2]
    with model.engine(**number, max_model_len=724) as llm:
        assert outcome(llm, short, NUM_TOKENS) == found[0]
    sizes = [[[len(x) for x in layer] for layer in held] for _, held in found[:2]]
    assert sizes[0] != sizes[1]
    assert [sum(map(sum, each)) for each in sizes] == [4 * 4 * BUDGET] * 2

"""Drafts change no answer: what is refused is taken back.

Workers have processes of their own here: see `known_drafts`.
"""

import json

import pytest

from tests.engine.helpers import (
    add,
    answers,
    assert_equal_densely,
    assert_pool_whole,
    engine,
    greedy,
    prompts_of,
    scheduler,
)
from tests.engine.known_drafts import speculating
from tests.engine.test_reference import (
    BUDGET,
    LENGTHS,
    SEEDS,
    VARIANTS,
    densely,
    settings_of,
)
from tests.engine.tiny_models import random_prompts, save_heads, save_llama

pytestmark = pytest.mark.engine

OF_TOKENS = [variant for variant in VARIANTS if variant.unit == "token"]


@pytest.mark.rule("R26")
def test_engine_equals_reference(tmp_path, monkeypatch):
    """Tokens, survivors and their values, by which score ever."""
    folder = save_llama(tmp_path)
    prompts = [random_prompts(n, seed=SEEDS[n])[0] for n in LENGTHS]
    expected = densely(folder, prompts, OF_TOKENS)
    texts = [
        prompt + result.tokens
        for results in expected.values()
        for prompt, result in zip(prompts, results, strict=True)
    ]
    options = speculating(texts, tmp_path / "texts", monkeypatch)
    options |= {"kv_policy": "h2o", "h2o_budget": BUDGET, "skip_tokenizer_init": True}
    with engine(folder, **options, h2o_head_budgets="uniform") as llm:
        drafts = count_drafts(llm)
        for variant in OF_TOKENS:
            llm.collective_rpc("probe_set_policy", args=(settings_of(variant),))
            assert_equal_densely(llm, prompts, expected[variant])
        assert min(drafts.values()) > 100
        assert_ends_at_a_stop_token(llm, prompts, expected[variant])


def assert_ends_at_a_stop_token(llm, prompts, expected):
    """Also where drafts behind it have been accepted."""
    count = len(expected[0].tokens)
    for at in range(count // 2, count // 2 + 4):
        stops = [result.tokens[at] for result in expected]
        parameters = [greedy(count, stop_token_ids=[stop]) for stop in stops]
        wanted = [
            result.tokens[: result.tokens.index(stop) + 1]
            for result, stop in zip(expected, stops, strict=True)
        ]
        assert answers(llm, prompts, parameters) == wanted
        assert_pool_whole(llm)


OPTIONS = {
    "share": {"h2o_budget": "20%", "h2o_min_budget": 64},
    "int8, chunks": {
        "h2o_budget": "15%",
        "h2o_min_budget": 32,
        "h2o_resident_dtype": "int8",
        "h2o_prefill_chunk": 192,
    },
    "gate": {"kv_policy": "gate", "h2o_budget": 128},
    "bfloat16": {"h2o_budget": 128, "dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("share", 1),
        ("int8, chunks", 1),
        ("int8, chunks", 2),
        ("gate", 1),
        ("bfloat16", 1),
    ],
)
def test_answers_are_those_without_drafts(tmp_path, monkeypatch, name, size):
    """Heads part, budgets grow, some stay dense, others ask for all; two ranks too."""
    folder = save_llama(tmp_path)
    save_heads(folder, gated=name == "gate")
    options = {"kv_policy": "h2o", "skip_tokenizer_init": True} | OPTIONS[name]
    prompts = random_prompts(40, 300, 90, 410, 200)
    wishes = [{}, {}, {}, {}, {"policy": "full"}]
    parameters = [greedy(150, extra_args={"h2o": wish}) for wish in wishes]
    if size > 1:  # ranks sum in another order than one alone
        options |= {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(folder, **options) as llm:
        expected, counted = observed(llm, prompts, parameters)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    options |= speculating(texts, tmp_path / "texts", monkeypatch)
    with engine(folder, **options) as llm:
        drafts = count_drafts(llm)
        assert observed(llm, prompts, parameters) == (expected, counted)
        assert min(drafts.values()) > 50


@pytest.mark.slow
def test_a_budget_that_holds_all_gives_stock_tokens():
    """With the same speculation: greedy, some requests could outgrow it, others not."""
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    options = {
        "speculative_config": ngrams,
        "distributed_executor_backend": "mp",
        "async_scheduling": False,
        "worker_extension_cls": "",
    }
    prompts = [text + text[:80] for text in prompts_of(190, 480, 33, 700)]
    with engine(**options) as llm:
        expected = answers(llm, prompts, greedy(100))
    with engine(enable_h2o=True, h2o_budget=1024, **options) as llm:
        drafts = count_drafts(llm)
        assert answers(llm, prompts, greedy(100)) == expected
        last = [greedy(1300, stop_token_ids=[tokens[-1]]) for tokens in expected]
        ends = [tokens[: tokens.index(tokens[-1]) + 1] for tokens in expected]
        assert answers(llm, prompts, last) == ends
        counted = scheduler(llm).h2o_stats
        assert counted.transitions == len(prompts) and counted.tokens_evicted == 0
        assert min(drafts.values()) > 50


def observed(llm, prompts, parameters):
    """Tokens of each prompt, and what has been counted."""
    tokens = answers(llm, prompts, parameters)
    assert_pool_whole(llm)
    counters = scheduler(llm).h2o_stats.as_dict()
    names = "transitions", "tokens_evicted"
    return tokens, [counters[name] for name in names]


def count_drafts(llm):
    """Drafts that are accepted, and that are refused, from now on."""
    counts = {"accepted": 0, "refused": 0}
    original = scheduler(llm).make_spec_decoding_stats

    def counting(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        counts["accepted"] += num_accepted_tokens
        counts["refused"] += num_draft_tokens - num_accepted_tokens
        return original(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    scheduler(llm).make_spec_decoding_stats = counting
    return counts


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_ngrams_beside_what_else_requests_ask_for(monkeypatch):
    """As users turn it on: with a grammar, log-probabilities, a conversation, and after
    a preemption."""
    from vllm.sampling_params import StructuredOutputsParams

    options = {
        "kv_policy": "h2o",
        "h2o_keep": "prompt",
        "h2o_budget": "20%",
        "h2o_min_budget": 64,
        "h2o_resident_dtype": "auto",
        "enable_prefix_caching": True,
    }
    text, other, third = prompts_of(500, 400, 300)
    texts = [text + text[:200], other, third]
    grammar = greedy(60, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    grammar.ignore_eos = False
    parameters = [greedy(60), greedy(40, logprobs=2), grammar]
    outcomes = []
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    drafting = {"speculative_config": ngrams, "distributed_executor_backend": "mp"}
    for speculation in ({}, drafting):
        with engine(**options, **speculation) as llm:
            drafts = count_drafts(llm)
            tokens = answers(llm, texts, parameters)
            turn = [*texts[0], *tokens[0], *third[:50]]
            going_on = greedy(20, extra_args={"h2o": {"continue": True}})
            tokens += answers(llm, [turn], going_on)
            counters = scheduler(llm).h2o_stats.as_dict()
            assert counters["continued_tokens"] > 600
            assert json.loads(llm.get_tokenizer().decode(tokens[2], True))
            add(llm, "preempted", other, 30)
            for _ in range(8):
                llm.llm_engine.step()
            scheduler(llm).reset_prefix_cache(reset_running_requests=True)
            while llm.llm_engine.has_unfinished_requests():
                outputs = llm.llm_engine.step()
            assert len(outputs[-1].outputs[0].token_ids) == 30
            assert_pool_whole(llm)
            assert (min(drafts.values()) > 10) == bool(speculation), drafts
            outcomes.append(tokens)
    assert outcomes[0] == outcomes[1]

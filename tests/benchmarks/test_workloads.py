"""Workload sizes: the issue's, scaled, and cut from one text."""

import pytest

from benchmarks.workloads import PAPER, WORKLOADS

TEXT = list(range(50_000))


def test_the_papers_lengths():
    lengths = [(w.input_len, w.output_len) for w in map(WORKLOADS.get, PAPER)]
    expected = [(128, 1024), (512, 512), (512, 1024), (2048, 2048), (4000, 256)]
    assert lengths == expected
    for name in PAPER:
        assert WORKLOADS[name].budgets == ("10%", "20%", "50%", "100%")


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_requests_have_the_lengths_that_are_drawn(name, scale):
    workload = WORKLOADS[name].scaled(scale)
    requests = workload.requests(TEXT)
    sizes = [(len(r["prompt_token_ids"]), r["output_len"]) for r in requests]
    assert sizes == workload.lengths()
    assert len(sizes) == workload.num_prompts
    assert max(p + o for p, o in sizes) <= workload.max_model_len
    if not workload.varied:
        assert set(sizes) == {(workload.input_len, workload.output_len)}
    assert len({tuple(r["prompt_token_ids"]) for r in requests}) == len(requests)


def test_chat_prompts_share_the_system_prompt_and_nothing_more():
    chat = WORKLOADS["chat"]
    prompts = [r["prompt_token_ids"] for r in chat.requests(TEXT)]
    assert all(p[: chat.prefix_len] == prompts[0][: chat.prefix_len] for p in prompts)
    assert len({p[chat.prefix_len] for p in prompts}) == len(prompts)
    assert len({len(p) for p in prompts}) > 10


def test_the_budget_of_short_never_binds_and_memory_is_for_all():
    short = WORKLOADS["short"]
    for budget in short.budgets:
        assert short.budget_tokens(budget) >= short.max_model_len
    assert short.pool_requests >= 2 * short.num_prompts


def test_growth_keeps_everything_but_the_context():
    growth = [w for name, w in WORKLOADS.items() if name.startswith("growth")]
    assert [w.max_model_len for w in growth] == [1024, 2048, 4096, 8192]
    assert {(w.output_len, w.num_prompts, w.budgets) for w in growth} == {
        (128, 8, ("820",))
    }


def test_scale_multiplies_lengths_and_budgets_in_tokens():
    half = WORKLOADS["growth-4096"].scaled(0.5)
    assert (half.input_len, half.output_len) == (1984, 64)
    assert half.budgets == ("410",)
    assert half.num_prompts == WORKLOADS["growth-4096"].num_prompts


@pytest.mark.parametrize(
    "budget, tokens", [("20%", 308), ("100%", 1536), ("12.5%", 192), ("820", 820)]
)
def test_budget_tokens(budget, tokens):
    assert WORKLOADS["512+1024"].budget_tokens(budget) == tokens


def test_a_short_text_is_read_again():
    workload = WORKLOADS["512+512"]
    prompts = [r["prompt_token_ids"] for r in workload.requests(TEXT[:1000])]
    assert all(len(p) == 512 for p in prompts)
    assert len(set(map(tuple, prompts))) == len(prompts)

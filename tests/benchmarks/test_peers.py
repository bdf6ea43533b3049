"""kvpress through our harness: nothing lost with room, bounded without."""

import pytest
import torch

pytest.importorskip("kvpress", reason="pip install --no-deps kvpress")

from benchmarks.quality.peers import FULL, PRESSES, PeerRunner
from tests.engine.tiny_models import random_prompts, save_llama

PROMPT, FORCED, INTERVAL, BUDGET = 200, 40, 8, 64


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return PeerRunner(save_llama(tmp_path_factory.mktemp("llama")), INTERVAL)


@pytest.fixture(scope="module")
def texts():
    """Two prompts and their continuations."""
    texts = random_prompts(PROMPT + FORCED, PROMPT + FORCED)
    return [t[:PROMPT] for t in texts], [t[PROMPT:] for t in texts]


@pytest.fixture(scope="module")
def full(runner, texts, tmp_path_factory):
    """Records of the full cache, and the reference files."""
    folder = tmp_path_factory.mktemp("references")
    references = [folder / "0.npy", folder / "1.npy"]
    return runner.forced(FULL, *texts, 0, references), references


def logprobs(records):
    return torch.tensor([record.logprobs for record in records])


def streaming_mask(sinks=4):
    """`[1, 1, n, n]` float: what StreamingLLM leaves to each query of a text."""
    n = PROMPT + FORCED - 1
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    for query in range(PROMPT, n):
        compressed_at = query - (query - PROMPT) % INTERVAL
        visible[query, sinks : compressed_at - (BUDGET - sinks)] = False
    return torch.zeros(n, n).masked_fill(~visible, float("-inf"))[None, None]


@pytest.mark.parametrize("press", PRESSES)
def test_room_for_all_is_the_full_cache(press, runner, texts, full):
    records, references = full
    got = runner.forced(press, *texts, PROMPT + FORCED, references)
    torch.testing.assert_close(logprobs(got), logprobs(records), atol=1e-4, rtol=0)
    assert max(max(record.kl) for record in got) < 1e-4
    assert [r.top1 for r in got] == [r.top1 for r in records]


@pytest.mark.parametrize("press", PRESSES)
def test_budget_and_interval_bound_what_is_held(press, runner, texts, full):
    got = runner.forced(press, *texts, BUDGET, full[1])
    assert [r.held_tokens for r in got] == [BUDGET + INTERVAL] * 2
    assert min(sum(record.kl) for record in got) > 0.01


@pytest.mark.parametrize("press", sorted(PRESSES.keys() - {"random"}))
def test_texts_side_by_side_are_texts_alone(press, runner, texts):
    both = runner.forced(press, *texts, BUDGET, None)
    alone = [
        runner.forced(press, [prompt], [forced], BUDGET, None)[0]
        for prompt, forced in zip(*texts, strict=True)
    ]
    torch.testing.assert_close(logprobs(both), logprobs(alone), atol=1e-4, rtol=0)


def test_positions_are_logical(runner, texts):
    """StreamingLLM is one masked pass at the positions of the text."""
    prompt, forced = texts[0][0], texts[1][0]
    with torch.no_grad():
        logits = runner.model(
            input_ids=torch.tensor([prompt + forced[:-1]]),
            attention_mask=streaming_mask(),
            use_cache=False,
            logits_to_keep=FORCED,
        ).logits[0]
    wanted = logits.log_softmax(-1)[torch.arange(FORCED), torch.tensor(forced)]
    got = runner.forced("streaming_llm", [prompt], [forced], BUDGET, None)
    torch.testing.assert_close(logprobs(got)[0], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("press", [FULL, *PRESSES])
@pytest.mark.parametrize("question_known", [True, False])
def test_an_answer_with_room_for_all_is_greedy(press, question_known, runner, texts):
    prompt = texts[0][0]
    generated = runner.model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
    )
    context, question = prompt[:-20], prompt[-20:]
    answer = runner.answer(press, context, question, 12, PROMPT + 40, question_known)
    assert answer == generated[0, PROMPT:].tolist()


def test_unknown_names_and_uneven_texts_are_refused(runner, texts):
    with pytest.raises(ValueError, match="no press 'nothing'"):
        runner.forced("nothing", *texts, BUDGET, None)
    with pytest.raises(ValueError, match="cut them to one length"):
        runner.forced("tova", [[1] * 8, [1] * 9], texts[1], BUDGET, None)

"""Block decisions that are shared, against the full model and tests/reference."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality.shared_blocks import (
    SHARED_BY,
    BlockPolicy,
    BlockReader,
    BlockStore,
    SharedBlocks,
)
from tests.engine.tiny_models import random_prompts, save_llama
from tests.reference.dense_h2o import DenseLlama, Sizes, Variant, generate

PROMPT, FORCED, BUDGET = 200, 60, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def blocks(folder):
    return SharedBlocks(folder)


@pytest.fixture(scope="module")
def texts():
    texts = random_prompts(PROMPT + FORCED, PROMPT + FORCED)
    return [t[:PROMPT] for t in texts], [t[PROMPT:] for t in texts]


@pytest.mark.parametrize("unit", [1, 16, 32])
@pytest.mark.parametrize("shared_by", SHARED_BY)
def test_room_for_all_is_the_full_model(unit, shared_by, folder, blocks, texts):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([p + f for p, f in zip(*texts, strict=True)])
    with torch.no_grad():
        logits = model(tokens[:, :-1], logits_to_keep=FORCED).logits
    wanted = logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None])[..., 0]
    policy = BlockPolicy(unit, shared_by)
    records = blocks.forced(policy, *texts, 288, None)
    got = torch.tensor([record.logprobs for record in records])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("score", ["sum", "mean", "random"])
@pytest.mark.parametrize("unit", [1, 8])
def test_the_budget_is_never_exceeded(unit, score, blocks, texts):
    records = blocks.forced(BlockPolicy(unit, "layer", score), *texts, BUDGET, None)
    assert [record.held_tokens for record in records] == [BUDGET, BUDGET]


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("unit", [1, 8])
def test_heads_on_their_own_are_the_dense_reference(unit, score, folder, blocks, texts):
    """Greedy tokens of tests/reference are this model's first choices."""
    prompt = texts[0][0]
    variant = Variant(None, 1, score, "block" if unit > 1 else "token")
    sizes = Sizes(heavy=BUDGET // 2, recent=BUDGET // 2, block=unit)
    (result,) = generate(DenseLlama(folder), prompt, FORCED, [variant], sizes)
    policy = BlockPolicy(unit, "head", score)
    (record,) = blocks.forced(policy, [prompt], [result.tokens], BUDGET, None)
    assert record.top1 == result.tokens


@pytest.mark.parametrize("shared_by", SHARED_BY)
def test_who_shares_keeps_the_same_blocks(shared_by, blocks, texts):
    store = BlockStore(BlockPolicy(8, shared_by), BUDGET)
    reader = BlockReader(blocks.model, store)
    tokens = torch.tensor(texts[0])
    with torch.no_grad():
        reader.read(tokens[:, :-20])
        for i in range(PROMPT - 20, PROMPT):
            reader.read(tokens[:, i : i + 1])
    kept = store.blocks[:, 0].sort(dim=-1).values  # layers, heads, slots
    assert kept.max() == (PROMPT - 1) // 8 and (kept[..., 0] == 0).all()
    assert bool((kept == kept[:, :1]).all()) == (shared_by != "head")
    assert bool((kept == kept[:1, :1]).all()) == (shared_by == "model")


def test_an_answer_with_room_for_all_is_greedy(blocks, folder, texts):
    prompt = texts[0][0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    generated = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
    )[0, PROMPT:].tolist()
    for question_known in (True, False):
        answer = blocks.answer(
            BlockPolicy(8, "model"), prompt[:-20], prompt[-20:], 12, 256, question_known
        )
        assert answer == generated


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="shared_by='world'"):
        BlockPolicy(shared_by="world")
    with pytest.raises(ValueError, match="give at least 4 blocks"):
        BlockStore(BlockPolicy(32), 64)

"""Prompts compressed once: kvpress's masks, and what is attended to by them."""

import pytest
import torch
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

pytest.importorskip("kvpress", reason="pip install --no-deps kvpress")

from benchmarks.quality.cells import LOSS, PROMPT_ONLY, Cell
from benchmarks.quality.grid import PROMPT_PRESSES
from benchmarks.quality.prompt_only import (
    KVZAP,
    LUKV,
    METHODS,
    PRESSES,
    PromptOnlyRunner,
)
from benchmarks.quality.systems import system_of
from benchmarks.smollm2 import ensure_model
from tests.engine.tiny_models import random_prompts, save_gpt_oss, save_reading_llama
from vllm_h2o.calibration.texts import calibration_texts

PROMPT, FORCED, BUDGET = 200, 12, 64
SLOTS = 2 * 4 * BUDGET
"""Of all layers and KV heads."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    runner = PromptOnlyRunner(save_reading_llama(tmp_path_factory.mktemp("llama")))
    yield runner
    runner.close()


def test_the_benchmark_has_all():
    assert set(PROMPT_PRESSES) == {*METHODS}


@pytest.mark.parametrize("kind", ["by layer", "everywhere"])
def test_models_with_windows_are_refused(tmp_path, kind):
    """There are no masks for these, whether each layer says so or the config does."""
    if kind == "by layer":
        folder = save_gpt_oss(tmp_path)
    else:
        config = MistralConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64,
            num_attention_heads=2, num_key_value_heads=2, sliding_window=16,
        )  # fmt: skip
        MistralForCausalLM(config).save_pretrained(tmp_path)
        folder = tmp_path
    with pytest.raises(ValueError, match="layers without full attention.*use a llama"):
        PromptOnlyRunner(folder)


def test_a_chat_is_told_by_its_beginning(runner, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    monkeypatch.setattr(runner, "_tokenizer", tokenizer)
    turn = [{"role": "user", "content": "Who counted?"}]
    chat = tokenizer.apply_chat_template(turn, tokenize=False)
    for said, is_chat in ((chat, True), ("Who counted?", False)):
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert runner._is_chat(torch.tensor(ids)) is is_chat


@pytest.fixture(scope="module")
def text():
    """A prompt and its continuation."""
    (text,) = random_prompts(PROMPT + FORCED)
    return text[:PROMPT], text[PROMPT:]


def kept_of(runner, method, prompt, budget=BUDGET):
    with runner.reader(method, budget) as reader, torch.no_grad():
        reader.read(torch.tensor([prompt]))
        return [layer.self_attn.kept for layer in runner.model.model.layers]


FITTED = pytest.param(KVZAP, marks=pytest.mark.slow)


@pytest.mark.parametrize("method", [*sorted({*PRESSES} - {LUKV}), FITTED])
def test_as_many_tokens_as_the_budget_has(method, runner, text):
    kept = kept_of(runner, method, text[0])
    assert sum(int(mask.sum()) for mask in kept) == pytest.approx(SLOTS, abs=1)
    assert all(len(mask) == 4 and mask.shape[1] == PROMPT for mask in kept)


@pytest.mark.parametrize("method", ["snapkv", "adakv_snapkv", "kvzip", FITTED])
def test_room_for_all_is_the_full_cache(method, runner, text):
    prompt, forced = text
    (record,) = runner.forced(method, [prompt], [forced], PROMPT, None)
    with torch.no_grad():
        ids = torch.tensor([prompt + forced[:-1]])
        logits = runner.model(input_ids=ids).logits[0, PROMPT - 1 :]
    expected = logits.log_softmax(-1)[torch.arange(FORCED), torch.tensor(forced)]
    torch.testing.assert_close(
        torch.tensor(record.logprobs), expected, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "method", ["kvzip", "adakv_snapkv", "adakv_expected_attention", "kvgrad"]
)
def test_masks_do_what_those_of_kvpress_do(method, runner, text):
    """Theirs hide a token behind a key that no query of a step looks at."""
    prompt, forced = text
    (record,) = runner.forced(method, [prompt], [forced], BUDGET, None)
    with runner.reader(method, BUDGET) as reader, torch.no_grad():
        logits = reader.read(torch.tensor([prompt]))
        runner.model.set_attn_implementation("sdpa")
        theirs = []
        for i, token in enumerate(forced):
            theirs.append(float(logits[0].log_softmax(-1)[token]))
            if i + 1 < len(forced):
                logits = runner.model(
                    input_ids=torch.tensor([[token]]), past_key_values=reader.cache
                ).logits[:, -1]
    torch.testing.assert_close(
        torch.tensor(record.logprobs), torch.tensor(theirs), atol=1e-4, rtol=0
    )


@pytest.mark.slow
def test_kvzap_learns_what_kvzip_finds(runner):
    """The beginning of a text that it learned from, where neither keeps tokens for
    their place, has more in common than by chance."""
    learned = calibration_texts()["code"]
    prompt = runner._tokenizer(learned)["input_ids"][:PROMPT]
    middle = slice(4, PROMPT - BUDGET // 2)
    ours, theirs = (
        torch.stack(kept_of(runner, name, prompt))[..., middle]
        for name in (KVZAP, "kvzip_plus")
    )
    chance = float(theirs.float().mean())
    assert float(theirs[ours].float().mean()) > chance + 0.05


@pytest.mark.engine
def test_what_the_engine_keeps(tmp_path, text, monkeypatch):
    """The engine keeps as many tokens as the budget has, and `lukv` as many of each
    head."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = save_reading_llama(tmp_path)
    cell = Cell(
        PROMPT_ONLY, "h2o", LOSS, BUDGET, PROMPT, model=str(folder),
        options={"resident_dtype": "model"},
    )  # fmt: skip
    system = system_of(cell)
    try:
        kept = kept_of(system.runner, "h2o", text[0])
        assert sum(int(mask.sum()) for mask in kept) == SLOTS
        counts = [mask.sum(dim=-1).tolist() for mask in kept]
        theirs = kept_of(system.runner, LUKV, text[0])
        assert [mask.sum(dim=-1).tolist() for mask in theirs] == counts
        assert any((a != b).any() for a, b in zip(kept, theirs, strict=True))
    finally:
        system.close()


def test_answers_are_greedy_with_room_for_all(runner, text):
    prompt = text[0]
    expected = runner.model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1
    )
    for known in (True, False):
        answer = runner.answer("kvzip", prompt[:-20], prompt[-20:], 8, PROMPT, known)
        assert answer == expected[0, PROMPT:].tolist()

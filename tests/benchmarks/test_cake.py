"""CAKE after its authors' code: what the preset of that name is compared with."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality.cake import WINDOW, CakeReader, CakeRunner
from benchmarks.quality.reading import force
from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import prompts_of

PROMPT, FORCED = 300, 12


@pytest.fixture(scope="module")
def runner():
    return CakeRunner(ensure_model())


@pytest.fixture(scope="module")
def texts():
    return prompts_of(*[PROMPT + FORCED] * 2)


@torch.inference_mode()
def test_what_fits_the_budget_is_read_as_ever(runner, texts):
    model = AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=torch.float32)
    prompts, rest = [t[:PROMPT] for t in texts], [t[PROMPT:] for t in texts]
    for text, record in zip(
        texts, runner.forced("cake", prompts, rest, PROMPT, None), strict=True
    ):
        logits = model(torch.tensor([text])).logits[0, PROMPT - 1 : -1]
        expected = logits.log_softmax(dim=-1)[range(FORCED), text[PROMPT:]]
        torch.testing.assert_close(
            torch.tensor(record.logprobs), expected, rtol=0, atol=1e-3
        )


def test_layers_hold_what_they_prefer_and_the_budget_on_average(runner, texts):
    budget = 96
    for text in texts:
        reader = CakeReader(runner.model, budget)
        force(reader, [text[:PROMPT]], [text[PROMPT:]], None)
        held = [keys.shape[2] for keys in reader.store.keys]
        assert [keys.shape[2] for keys in reader.store.values] == held
        assert sum(held) == budget * len(held) and reader.held_tokens == budget
        assert min(held) >= WINDOW and len(set(held)) > 5


def test_the_newest_tokens_and_those_that_get_attention_stay(runner, texts):
    reader = CakeReader(runner.model, 96)
    with torch.inference_mode():
        reader.read(torch.tensor([texts[0][:PROMPT]]))
        before = [keys.clone() for keys in reader.store.keys]
        reader.read(torch.tensor([[texts[0][PROMPT]]]))
    for old, new in zip(before, reader.store.keys, strict=True):
        assert new.shape == old.shape
        assert torch.equal(new[:, :, -WINDOW:-1], old[:, :, 1 - WINDOW :])
        for head in range(new.shape[1]):
            kept = (new[0, head, :, None] == old[0, head]).all(dim=-1).any(dim=1)
            assert kept[:-1].all() and not kept[-1]

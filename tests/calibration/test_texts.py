"""The texts that an engine reads to measure its heads."""

import pytest
from transformers import AutoTokenizer

from benchmarks.smollm2 import ensure_model
from vllm_h2o.calibration.texts import MOST_TOKENS, calibration_texts, digest


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_model())


def test_the_texts_are_those_of_the_published_figures():
    """Others give every model other head budgets and another gate: whoever changes a
    text measures the tables of docs/benchmarks/quality.md anew."""
    assert digest() == "1444ce60"


@pytest.mark.parametrize("name", ["code", "facts", "narrative-en", "narrative-es"])
@pytest.mark.parametrize("num_tokens", [512, 1024, MOST_TOKENS])
def test_a_text_is_long_enough(tokenizer, name, num_tokens):
    text = calibration_texts(num_tokens)[name]
    assert len(tokenizer.encode(text)) > num_tokens


@pytest.mark.parametrize("num_tokens", [512, 1024, MOST_TOKENS])
def test_what_is_asked_for_has_been_said(tokenizer, num_tokens):
    """In the end of the text that is read, of nearly all."""
    facts = calibration_texts(num_tokens)["facts"]
    assert calibration_texts(num_tokens)["facts"] == facts
    lines = tokenizer.decode(tokenizer.encode(facts)[-num_tokens:]).splitlines()
    asked = [line for line in lines if line.startswith("What is the code of ")]
    assert len(asked) >= 12
    for line in asked:
        who, code = (
            line.removeprefix("What is the code of ").rstrip(".").split("? It is ")
        )
        assert f"The code of {who} is {code}." in lines

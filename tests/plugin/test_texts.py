"""The texts that an engine reads to measure its heads."""

import pytest
from transformers import AutoTokenizer

from benchmarks.smollm2 import ensure_model
from vllm_h2o.plugin.calibration import MOST_TOKENS
from vllm_h2o.plugin.texts import calibration_texts


@pytest.mark.parametrize("name", ["code", "facts", "narrative-en", "narrative-es"])
def test_a_text_is_long_enough(name):
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    assert len(tokenizer.encode(calibration_texts()[name])) > MOST_TOKENS


def test_what_is_asked_for_has_been_said():
    facts = calibration_texts()["facts"]
    *_, asked = facts.splitlines()
    who, code = asked.removeprefix("What is the code of ").rstrip(".").split("? It is ")
    assert f"The code of {who} is {code}." in facts
    assert calibration_texts()["facts"] == facts

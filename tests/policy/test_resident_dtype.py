"""What `--h2o-resident-dtype auto` is, and why."""

from dataclasses import replace

import pytest

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.presets import PRESETS
from vllm_h2o.policy.resident_dtype import resident_dtype_of


@pytest.mark.parametrize(
    ("options", "device", "can_round", "expected", "said"),
    [
        ({}, "cpu", True, "int8", "more tokens in the same memory"),
        ({"prefill_chunk": 512, "keep": "end"}, "cpu", True, "int8", "more tokens"),
        ({"read": "20%"}, "cpu", True, "int8", "more tokens"),
        ({}, "cuda", True, "model", "not known to pay on cuda"),
        ({}, "cpu", False, "model", "kernels have no int8"),
        ({"merge": "value"}, "cpu", True, "model", "h2o_merge='value'"),
        ({"eviction_unit": "block"}, "cpu", True, "model", "eviction_unit"),
        (
            {"positions": "cache", "prefill_chunk": 64},
            "cpu",
            True,
            "model",
            "positions",
        ),
    ],
)
def test_int8_where_it_pays_and_nothing_is_in_its_way(
    options, device, can_round, expected, said
):
    config = H2OConfig(**options)
    assert config.resident_dtype == "auto"
    found, why = resident_dtype_of(config, device, can_round)
    assert found == expected and said in why
    # What it chooses is never refused.
    replace(config, resident_dtype=found)


def test_methods_of_papers_hold_what_the_model_has():
    left_open = {x for x, config in PRESETS.items() if config.resident_dtype == "auto"}
    assert left_open == {"h2o", "gate"}

"""The profiled share of attention, out of a real trace."""

import pytest

from benchmarks.attention_share import parse_args
from benchmarks.process import run_in_process

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_attention_is_a_part_of_the_step():
    args = parse_args("--context 200 --requests 2 --budget 64 --steps 3".split())
    job = vars(args) | {"system": "h2o", "output": None}
    found = run_in_process("benchmarks.attention_share:profile", job)
    assert 0 < found["attention_ms"] < found["step_ms"]
    share = found["attention_ms"] / found["step_ms"]
    assert found["attention_share"] == pytest.approx(share)

"""A server of ours under vLLM's own client."""

import pytest

from benchmarks.serve import parse_args, turn
from tests.engine.tiny_models import save_reading_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_turn_gives_what_vllm_bench_serve_saves(tmp_path):
    sizes = "--prefix-len 64 --suffix-len 64 --output-len 32 --budget 64"
    options = [*sizes.split(), "--num-prompts", "4", "--request-rate", "4"]
    model = save_reading_llama(tmp_path / "model")
    args = parse_args([*options, "--model", str(model)])
    saved = turn("h2o", args)
    assert saved["completed"] == 4
    assert saved["total_output_tokens"] == 4 * 32
    assert 0 < saved["median_ttft_ms"] <= saved["p99_ttft_ms"]
    assert saved["request_rate"] == 4

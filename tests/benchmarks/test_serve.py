"""A server of ours under vLLM's own client."""

import pytest

from benchmarks.serve import parse_args, turn

pytestmark = pytest.mark.engine


def test_a_turn_gives_what_vllm_bench_serve_saves():
    sizes = "--prefix-len 64 --suffix-len 64 --output-len 32 --budget 64"
    args = parse_args([*sizes.split(), "--num-prompts", "4", "--request-rate", "4"])
    saved = turn("h2o", args)
    assert saved["completed"] == 4
    assert saved["total_output_tokens"] == 4 * 32
    assert 0 < saved["median_ttft_ms"] <= saved["p99_ttft_ms"]
    assert saved["request_rate"] == 4

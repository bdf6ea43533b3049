"""A sweep on local Ray: one rank, two ranks, a cell that fails, a resume."""

import csv
import json

import pytest
import ray

from benchmarks.compare import result_path
from benchmarks.ray_sweep import start_ray, sweep
from tests.benchmarks.helpers import tiny_cell
from tests.engine.tiny_models import save_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# K and V of 32 tokens, for 4 layers of 4 heads of 32, float32.
_PAGE_BYTES = 2 * 32 * 4 * 4 * 32 * 4


@pytest.fixture
def local_ray(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    start_ray(num_cpus=2)
    yield
    ray.shutdown()


@pytest.mark.parametrize("ranks", [[2], [1, 2]])
def test_a_sweep_survives_a_failure_and_resumes(tmp_path, local_ray, ranks):
    model = save_llama(tmp_path / "model")
    output = tmp_path / "results"
    good = [tiny_cell(model, num_prompts=2, tensor_parallel_size=n) for n in ranks]
    too_large = tiny_cell(model, tensor_parallel_size=64)
    bad = [(too_large, "use fewer ranks")]
    if len(ranks) > 1:
        bad.append((tiny_cell(tmp_path / "nothing"), "nothing"))

    counts = sweep([*(cell for cell, _ in bad), *good], output)
    assert counts == {"done": len(good), "failed": len(bad), "skipped": 0}
    for cell in good:
        result = json.loads(result_path(cell, output).read_text())
        assert result["tensor_parallel_size"] == cell.tensor_parallel_size
        stock, ours = (system["samples"][0] for system in result["systems"])
        assert stock["total_output_tokens"] == ours["total_output_tokens"] == 2 * 64
        assert ours["h2o"]["transitions"] == 2
        # Two ranks hold half the heads each.
        page = stock["kv_pool_bytes"] / (stock["kv_blocks"] + 1)
        assert page * cell.tensor_parallel_size == _PAGE_BYTES
    for cell, complaint in bad:
        path = result_path(cell, output).with_suffix(".failed.json")
        failure = json.loads(path.read_text())
        assert failure["command"] == cell.command()
        assert complaint in failure["error"]

    # The failed cell is tried again, the others are not.
    before = result_path(good[0], output).stat().st_mtime_ns
    counts = sweep([too_large, *good], output)
    assert counts == {"done": 0, "failed": 1, "skipped": len(good)}
    assert result_path(good[0], output).stat().st_mtime_ns == before
    with (output / "throughput.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(good)

"""One real comparison: every system, on a random model, in seconds."""

import csv
import json
import multiprocessing
import shlex

import pytest

from benchmarks import compare
from benchmarks.compare import result_path
from benchmarks.live import LiveSystems
from tests.benchmarks.helpers import tiny_cell
from tests.engine.tiny_models import save_llama

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("baselines", "policies"),
    [
        (("stock",), ("h2o-model",)),
        pytest.param(
            ("stock", "transformers"), ("h2o-model", "kvpress"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_comparison_from_the_command_line(tmp_path, baselines, policies):
    model = save_llama(tmp_path / "model")
    cell = tiny_cell(model, baselines=baselines, policies=policies)
    output = tmp_path / "results"
    options = shlex.split(cell.command())[3:]
    compare.main([*options, "--output-dir", str(output)])

    result = json.loads(result_path(cell, output).read_text())
    systems = {system["label"]: system for system in result["systems"]}
    assert list(systems) == [*baselines, *(f"{policy} 50%" for policy in policies)]
    samples = {label: system["samples"][0] for label, system in systems.items()}
    for sample in samples.values():
        assert sample["completed"] == 6
        assert sample["total_input_tokens"] == 6 * 64
        assert sample["total_output_tokens"] == 6 * 64
        assert 0 < sample["p50_ttft_ms"] <= sample["p99_ttft_ms"]
        assert 0 < sample["p50_tpot_ms"] <= sample["p99_tpot_ms"]
    stock, ours = samples["stock"], samples["h2o-model 50%"]
    # As many bytes; pages of ours also hold scores and births.
    assert stock["kv_pool_bytes"] == ours["kv_pool_bytes"]
    assert stock["kv_blocks"] == 2 * 4
    assert ours["kv_blocks"] < stock["kv_blocks"]
    assert 0 < ours["peak_kv_blocks"] <= ours["kv_blocks"]
    assert ours["preemptions"] == 0
    # All requests have as many tokens: no gap between two of them is left out.
    for sample in (stock, ours):
        assert sample["mean_itl_ms"] == pytest.approx(sample["mean_tpot_ms"])
        assert sample["median_itl_ms"] > 0
        decoding = 63 * sample["median_itl_ms"]
        assert sample["median_ttft_and_transition_ms"] == pytest.approx(
            sample["median_e2el_ms"] - decoding
        )
    assert ours["h2o"]["transitions"] == 6
    assert ours["h2o"]["tokens_evicted"] == 6 * (64 + 64 - 1 - 64)
    for sample in samples.values():
        assert 1 <= sample["mean_running_requests"] <= sample["max_running_requests"]
    with (output / "throughput.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == [*baselines, *policies]


# Started anew after two turns, or not at all.
@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "restart_every"), [(2, None), (3, 2)])
def test_engines_that_stay_up_and_prompts_that_were_read_before(
    tmp_path, monkeypatch, rounds, restart_every
):
    """Two engines side by side; they share nothing but the machine."""
    started = []
    find = LiveSystems._find

    def watched(systems, job):
        system = find(systems, job)
        started.append((job.system, system.process.pid))
        return system

    monkeypatch.setattr(LiveSystems, "_find", watched)
    model = save_llama(tmp_path / "model")
    cell = tiny_cell(
        model, workload="decode-4000", budgets=("64",), rounds=rounds,
        together=True, restart_every=restart_every, pool_requests=20,
    )  # fmt: skip
    result = compare.run(cell)
    for system in ("stock", "h2o"):
        first, second, *third = (pid for name, pid in started if name == system)
        assert first == second and first not in third
    assert not multiprocessing.active_children(), "an engine is still there"
    prompt = cell.resolve_workload().input_len
    for system in result["systems"]:
        assert len(system["samples"]) == rounds
        for sample in system["samples"]:
            assert sample["completed"] == 6
            # All of a prompt but its last block, or what H2O's window needs.
            assert sample["prefix_cache_hits"] >= 6 * (prompt - 64 - 32)
    assert result["systems"][1]["samples"][1]["h2o"]["transitions"] == 6


@pytest.mark.slow
def test_a_system_that_ends_is_named(tmp_path, capfd):
    model = save_llama(tmp_path / "model")
    cell = tiny_cell(model, together=True, engine_args={"max_num_seqs": 0})
    with pytest.raises(RuntimeError, match="stock ended"):
        compare.run(cell)
    assert "max_num_seqs" in capfd.readouterr().err

"""Ratios, spreads and the CSV."""

import csv

import pytest

from benchmarks.report import FIELDS, append_rows, ratios, rows, table
from tests.benchmarks.helpers import made_up_result, sample, tiny_cell


def test_ratios_are_ours_over_the_baselines_turn_by_turn():
    stock = [sample(10, 100, 1000), sample(5, 200, 2000), sample(10, 100, 1000)]
    ours = [sample(20, 50, 1100), sample(20, 50, 2000), sample(10, 80, 900)]
    found = ratios(ours, stock)
    throughput = found["ratio_output_tokens_per_s"]
    assert throughput == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert found["ratio_tpot"] == {"median": 0.5, "min": 0.25, "max": 0.8}
    expected = {"median": 1.0, "min": 0.9, "max": pytest.approx(1.1)}
    assert found["ratio_ttft"] == expected


def test_ratios_need_a_partner_for_every_sample():
    with pytest.raises(ValueError):
        ratios([sample(1, 1, 1)], [sample(1, 1, 1)] * 2)


def test_csv_has_the_schema_and_one_header(tmp_path):
    path = tmp_path / "results" / "throughput.csv"
    result = made_up_result(tiny_cell("some/model", rounds=2))
    append_rows(path, rows(result))
    append_rows(path, rows(result))
    assert path.read_text().splitlines()[0] == (
        "workload,budget_fraction,policy,ratio_output_tokens_per_s,ratio_tpot,"
        "ratio_ttft,preemptions,peak_blocks,concurrency,samples,model,hardware,"
        "vllm_version,date,command"
    )
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 4 and all(set(row) == set(FIELDS) for row in found)
    stock, ours = found[:2]
    assert stock["policy"] == "stock" and stock["budget_fraction"] == ""
    assert float(stock["ratio_tpot"]) == 1.0
    assert ours["policy"] == "h2o" and float(ours["budget_fraction"]) == 0.5
    assert float(ours["ratio_output_tokens_per_s"]) == 2.25
    assert float(ours["ratio_tpot"]) == 0.45
    assert float(ours["concurrency"]) == 4.5
    assert ours["samples"] == "2" and ours["model"] == "model"
    assert ours["workload"] == "512+512 x0.125"
    assert ours["command"].startswith("python -m benchmarks.compare --workloads")


def test_a_system_without_kv_blocks_leaves_them_empty():
    cell = tiny_cell("m", rounds=2, baselines=("stock", "transformers"))
    result = made_up_result(cell)
    for measured in result["systems"][1]["samples"]:
        assert measured["peak_kv_blocks"]
    del result["systems"][1]["summary"]["peak_kv_blocks"]
    assert rows(result)[1]["peak_blocks"] is None
    assert "transformers" in table(result)

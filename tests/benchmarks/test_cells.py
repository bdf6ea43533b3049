"""Cells: who takes turns, and the command that repeats them."""

import shlex

import pytest

from benchmarks import machine
from benchmarks.cells import Cell, Contender, run_cell
from benchmarks.compare import cells_of, parse_args
from benchmarks.machine import engine_env, threads_bind
from benchmarks.ray_sweep import parse_args as parse_sweep_args
from benchmarks.ray_sweep import sweep_cells
from tests.benchmarks.helpers import sample, tiny_cell


def cells(command):
    return cells_of(parse_args(shlex.split(command)))


@pytest.mark.parametrize(
    "cell",
    [
        Cell("512+1024"),
        Cell("chat", ("20%", "400"), ("h2o", "tova"), ("stock", "transformers")),
        tiny_cell("/some/model", tensor_parallel_size=2, repeats=3, together=True),
        Cell("short", rounds=6, together=True, restart_every=3),
        Cell("512+1024", ("20%",), share=True),
    ],
)
def test_the_command_repeats_the_cell(cell):
    words = shlex.split(cell.command())
    assert words[:3] == ["python", "-m", "benchmarks.compare"]
    assert cells(shlex.join(words[3:])) == [cell]


def test_any_other_option_is_another_result_file():
    variants = [
        Cell("short"),
        Cell("chat"),
        Cell("short", num_prompts=3),
        Cell("short", scale=0.5),
        Cell("short", tensor_parallel_size=2),
        Cell("short", together=True),
    ]
    assert len({cell.key() for cell in variants}) == len(variants)


def test_systems_take_turns_in_order():
    cell = tiny_cell("", budgets=("50%", "100%"), rounds=2, repeats=2)
    turns = []

    def measure(job):
        turns.append((job.system, job.budget_tokens))
        return [sample(len(turns), 1.0, 1.0)] * job.repeats

    result = run_cell(cell, measure)
    order = [("stock", None), ("h2o", 64), ("h2o", 128)]
    assert turns == order * 2
    systems = {system["label"]: system for system in result["systems"]}
    assert list(systems) == ["stock", "h2o 50%", "h2o 100%"]
    throughput = [s["output_throughput"] for s in systems["h2o 100%"]["samples"]]
    assert throughput == [3, 3, 6, 6]
    median = systems["h2o 100%"]["ratios"]["ratio_output_tokens_per_s"]["median"]
    assert median == pytest.approx((3 / 1 + 6 / 4) / 2)


def test_every_system_gets_the_same_requests_and_pool():
    cell = Cell("chat", ("20%",), baselines=("stock", "transformers"))
    requests = cell.resolve_workload().requests(list(range(50_000)))
    jobs = [cell.job(contender, requests) for contender in cell.contenders()]
    assert [job.system for job in jobs] == ["stock", "transformers", "h2o"]
    assert [job.budget_tokens for job in jobs] == [None, None, 308]
    assert {job.share for job in jobs} == {""}
    # 4 requests of 1536 tokens in blocks of 32.
    assert {job.pool_blocks for job in jobs} == {192}
    assert all(job.requests is requests and job.prefix_caching for job in jobs)


def test_groups_of_workloads_and_the_quick_run():
    assert len(cells("")) == 5
    assert len(cells("--workloads paper chat")) == 6
    quick = cells("--quick --rounds 1")
    assert [cell.workload for cell in quick] == ["128+1024", "short"]
    assert all(cell.rounds == 1 and cell.scale < 1 for cell in quick)


def test_a_sweep_has_a_cell_per_workload_budget_policy_and_size():
    options = "--workloads 512+512 short --policies h2o tova "
    args = parse_sweep_args(shlex.split(options + "--tensor-parallel-sizes 1 2"))
    found = [
        (c.workload, *c.budgets, *c.policies, c.tensor_parallel_size)
        for c in sweep_cells(args)
    ]
    assert len(found) == len(set(found)) == (4 + 1) * 2 * 2
    assert ("512+512", "20%", "tova", 2) in found


@pytest.mark.parametrize(
    "options, complaint",
    [
        ("--workloads 1+2", "--workloads '1\\+2' is unknown"),
        ("--policies h3o", "--baselines, --policies: 'h3o' is unknown"),
        ("--baselines stok", "'stok' is unknown"),
        ("--scale 0.1 --budgets 10%", "--budgets 10% .* a block of 32"),
        ("--pool-requests 1", "--pool-requests"),
        ("--restart-every 2", "--restart-every 2 needs --together"),
        ("--together --restart-every 0", "--restart-every 0 needs"),
    ],
)
def test_bad_options_are_refused_before_an_engine_starts(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        cells(options)


def test_labels():
    assert Contender("stock").label == "stock"
    assert Contender("h2o", "20%").label == "h2o 20%"


def test_ranks_share_the_cores():
    assert threads_bind([0, 1], 2) == "0|1"
    assert threads_bind([4, 5, 6, 7, 8], 2) == "4,5|6,7"
    with pytest.raises(ValueError, match="--tensor-parallel-size 3"):
        threads_bind([0, 1], 3)


def test_a_limit_of_threads_is_said(monkeypatch):
    monkeypatch.setattr(machine, "THREADS", None)
    assert "OMP" not in machine.hardware()
    monkeypatch.setattr(machine, "THREADS", "1")
    assert ", OMP_NUM_THREADS=1" in machine.hardware()


def test_engines_get_stocks_best_settings_unless_the_user_has_set_them(monkeypatch):
    names = {"VLLM_CPU_OMP_THREADS_BIND", "GOMP_SPINCOUNT"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert engine_env(1).keys() == names
    for name in names:
        monkeypatch.setenv(name, "the user's")
        assert engine_env(1).keys() == names - {name}
        monkeypatch.delenv(name)

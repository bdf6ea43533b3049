"""The scheduler benchmark runs, on a few requests."""

import json

from benchmarks import scheduler_overhead
from benchmarks.scheduler_overhead import PHASES


def test_both_schedulers_take_turns(tmp_path):
    path = tmp_path / "overhead.json"
    sizes = "--running 4 --prompt-tokens 80 --budget 64 --rounds 2 --steps 5".split()
    scheduler_overhead.main([*sizes, "--output", str(path)])
    result = json.loads(path.read_text())
    phases = {*PHASES, "total"}
    assert set(result["us_per_step"]) == {"stock", "h2o"}
    assert set(result["overhead_us_per_step"]) == phases
    for system in result["us_per_step"].values():
        assert set(system) == phases
        assert all(spread["median"] > 0 for spread in system.values())

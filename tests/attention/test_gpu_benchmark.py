"""The GPU benchmark runs, if only in miniature and interpreted."""

import json
import subprocess
import sys

from benchmarks.gpu.__main__ import targets

# The benchmark promises to need torch and triton only.
WITHOUT_VLLM = """
import runpy, sys
sys.modules["vllm"] = None
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_every_code_path_runs(tmp_path):
    output = tmp_path / "gpu.json"
    options = ["--tiny", "--sweep", "--output", str(output)]
    subprocess.run([sys.executable, "-c", WITHOUT_VLLM, *options], check=True)
    result = json.loads(output.read_text())
    assert all(row["ok"] for row in result["correctness"])
    kinds = [row["check"].split(":")[0] for row in result["correctness"]]
    assert sorted(kinds) == [
        "all queries",
        "chunk",
        "chunk's end",
        "gate",
        "selection block",
        "selection by head",
        "selection token",
        "step",
        "step block",
        "step by head",
        "step that reads a part",
        "step token",
        "transition",
        "window",
    ]
    assert any("by head" in row["part"] for row in result["prompt"])
    assert any("by head" in row["kernel"] for row in result["decode"])
    for part in ("decode", "sweep", "prompt"):
        assert all(row["us_per_layer"] > 0 for row in result[part])
    assert "targets" not in result, "interpreted times were held against targets"
    assert len(targets(result)) == 4

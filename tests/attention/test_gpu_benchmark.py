"""The GPU benchmark runs, if only in miniature and interpreted."""

import json
import subprocess
import sys


def test_every_code_path_runs(tmp_path):
    output = tmp_path / "gpu.json"
    options = ["--tiny", "--sweep", "--output", str(output)]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *options], check=True)
    result = json.loads(output.read_text())
    assert all(row["ok"] for row in result["correctness"])
    # A prompt, a transition, and steps of several kinds.
    assert len(result["correctness"]) >= 4
    for part in ("decode", "sweep", "prompt"):
        assert all(row["us_per_layer"] > 0 for row in result[part])
    assert "targets" not in result, "interpreted times were held against targets"

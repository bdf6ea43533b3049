"""The kernel benchmark runs, on a few pages."""

import json

import pytest
import torch

from benchmarks import kernel
from vllm_h2o.policy.profile import HeadProfile


def test_every_system_reads_in_turns(tmp_path):
    path, threads = tmp_path / "kernel.json", torch.get_num_threads()
    sizes = "--rows 2 --context 192 --layers 2 --rounds 2 --threads 1".split()
    try:
        kernel.main([*sizes, "--output", str(path)])
    finally:
        torch.set_num_threads(threads)
    result = json.loads(path.read_text())
    assert [cell["dtype"] for cell in result["cells"]] == ["float32", "bfloat16"]
    for cell in result["cells"]:
        item = 4 if cell["dtype"] == "float32" else 2
        assert cell["kv_bytes"] == 2 * 2 * 192 * 2 * 3 * 64 * item
        assert set(cell["gb_per_s"]) == set(kernel.SYSTEMS)
        assert all(rate["min"] > 0 for rate in cell["gb_per_s"].values())


def test_stock_and_bare_kernel_attend_alike():
    """Both read the same tokens, so what is timed is the same work."""
    sizes = "--rows 2 --context 192 --layers 2 --dtypes float32".split()
    state = kernel.State(torch.float32, kernel.parse_args(sizes))
    state.run(kernel.BARE)
    ours = state.step.output.clone()
    state.run(kernel.STOCK)
    torch.testing.assert_close(state.step.output, ours, rtol=1e-4, atol=1e-5)


def test_heads_get_pages_by_a_profile(tmp_path, capsys):
    poor, rich = [1e-6, 1e-6], [1.0, 1e-6]
    file = tmp_path / "heads.json"
    HeadProfile([32, 192], [[poor] * 3, [rich] * 3]).save(file)
    options = ["--profile", str(file), "--max-model-len", "256", "--layers"]
    args = kernel.parse_args([*options, "2"])
    assert kernel._uneven_blocks(args, 4) == [[1] * 3, [7] * 3]
    sizes = "2 --rows 1 --context 128 --rounds 1 --dtypes float32 --threads 1".split()
    output, threads = tmp_path / "kernel.json", torch.get_num_threads()
    try:
        kernel.main([*options, *sizes, "--output", str(output)])
    finally:
        torch.set_num_threads(threads)
    assert json.loads(output.read_text())["options"]["profile"] == str(file)
    with pytest.raises(SystemExit):
        kernel.parse_args([*options, "4"])
    assert "give as many as" in capsys.readouterr().err

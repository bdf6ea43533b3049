"""The kernel benchmark runs, on a few pages."""

import json

import torch

from benchmarks import kernel


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

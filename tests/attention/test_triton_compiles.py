"""The Triton kernels compile for GPUs, with no GPU at hand."""

import json
import os
import subprocess
import sys

import pytest

from tests.attention.compile_triton import SPARSE


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile(capability):
    command = [sys.executable, "-m", "tests.attention.compile_triton", str(capability)]
    env = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    shared_bytes = found["shared_bytes"]
    assert set(shared_bytes) == {
        "attend_kernel", "combine_kernel", "gate_kernel", "lse_kernel",
        "observe_kernel", "image_kernel", "select_kernel", "gather_kernel",
        "scatter_kernel", "move_kernel", "ring_kernel", "held_kernel", "note_kernel",
        "take_back_kernel", "stage_kernel", "read_kernel", *SPARSE,
    }  # fmt: skip
    # What a program may have on the smallest of today's GPUs (8.6, 8.9).
    assert max(shared_bytes.values()) <= 99 * 1024
    # Layers of other budgets, other batches and prompts do not wait for a compiler.
    # What merges splits is compiled for 1, 2, 4 .. of them; these have 1, 3 and 16, and
    # decode a token of each row, or drafts beside it. A ring is moved out of its
    # slots, and back, and so is what is held. The first step of a chunk takes the
    # scores out of the slots too; queries score it, and prompts of which none is held.
    several = {"attend_kernel": 2, "combine_kernel": 3 * 2}
    several |= {"ring_kernel": 2, "held_kernel": 2, "stage_kernel": 2}
    several |= {"observe_kernel": 2}
    compiled = dict.fromkeys(shared_bytes.keys() - set(SPARSE), 1)
    assert found["variants"] == compiled | several
    # The new token's; K and V come 16 bytes at a time, by head, in int8 and dense too.
    assert found["short_loads"] == [2] * 10

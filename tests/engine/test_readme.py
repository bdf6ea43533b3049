"""What a newcomer copies out of the README runs as it stands there."""

import ast
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.smollm2 import ensure_model
from tests.engine.tiny_models import save_reading_llama

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
README, EXAMPLES = ROOT / "README.md", ROOT / "examples"


@pytest.fixture(params=["tiny", pytest.param("real", marks=pytest.mark.slow)])
def model(request, tmp_path):
    """Compiling takes most of the time, and a model of two layers a third of it."""
    tiny = request.param == "tiny"
    return save_reading_llama(tmp_path / "tiny") if tiny else ensure_model()


def test_quick_start(model, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "path/to/model" in code
    file = tmp_path / "quick_start.py"
    file.write_text(code.replace("path/to/model", str(model)))
    (counters,) = re.findall(r"{'transitions'.*}", printed(file))
    stats = ast.literal_eval(counters)
    assert stats["transitions"] == 1 and stats["tokens_evicted"] > 0


@pytest.mark.slow
def test_offline_example(model):
    output = printed(EXAMPLES / "offline.py", model)
    got = re.findall(r" got ({.*})", output)
    reports = [ast.literal_eval(report) for report in got]
    assert [r["policy"] for r in reports] == ["h2o"] * 3 + ["full"]
    plain, small, share, full = reports
    tokens = full["tokens_held"]
    assert tokens > 1000 and full["budget"] is None and not full["tokens_evicted"]
    # Whole blocks, which have more slots in int8 than tokens of the model's type.
    block = math.gcd(plain["budget"], small["budget"])
    in_blocks = [-(-asked // block) * block for asked in (512, 256)]
    assert block > 128 and [plain["budget"], small["budget"]] == in_blocks
    # A fifth of the memory holds up to twice as many tokens.
    assert 0.2 * (tokens + 1) < share["budget"] < 0.4 * (tokens + 1) + block
    for report in (plain, small, share):
        assert report["tokens_held"] == report["budget"]
        assert report["tokens_evicted"] == tokens - report["budget"]


@pytest.mark.slow
def test_conversation_example():
    """All turns but the first go on from the one before."""
    output = printed(EXAMPLES / "conversation.py", ensure_model())
    told = re.findall(r"(?m)^(\d+) tokens, (\d+) not read", output)
    turns, unread = ([int(turn[i]) for turn in told] for i in range(2))
    assert len(turns) == len(unread) == 10 and unread[0] == 0
    for before, known in zip(turns, unread[1:], strict=False):
        assert before <= known < before + 48


def printed(*command: str | Path) -> str:
    """What a script prints, run as a user runs it."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # As a user has it: the engine core in a process of its own.
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

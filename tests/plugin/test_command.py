"""`vllm serve` in a process of its own, as far as it needs no engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import SMOLLM2

pytestmark = pytest.mark.process


def serve(*options):
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_bad_option_stops_the_server_before_it_loads():
    done = serve(SMOLLM2, "--kv-policy", "h2o", "--h2o-budget", "0")
    assert done.returncode != 0
    assert "h2o_budget (--h2o-budget) is '0'" in done.stderr + done.stdout


def test_help_shows_the_options():
    done = serve("--help=H2O")
    assert "--h2o-budget" in done.stdout
    assert "in tokens" in done.stdout
    assert "20%" in done.stdout

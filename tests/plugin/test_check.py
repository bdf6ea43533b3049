"""`python -m vllm_h2o.check`: what it says is what engines do."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_models import save_llama, save_qwen3_next
from tests.models.families import FAMILIES
from vllm_h2o.check import main

TABLE = Path(__file__).parents[2] / "docs" / "models.md"


def run(*arguments):
    """Output, what goes to stderr, and the exit status of a command."""
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
    )
    return done.stdout, done.stderr, done.returncode


def test_a_hybrid_is_as_its_engine_has_it(tmp_path):
    """See tests/engine/test_hybrid.py."""
    model = save_qwen3_next(tmp_path) / "config.json"
    options = "--block-size", 32, "--max-model-len", 1024, "--h2o-budget", 288
    options += "--tensor-parallel-size", 2, "--h2o-prefill-chunk", 576
    options += "--h2o-resident-dtype", "model"
    # What vLLM takes of itself depends on the processor.
    options += "--mamba-ssm-cache-dtype", "float32"
    said, errors, status = run("vllm_h2o.check", model, *options)
    assert status == 0, errors
    assert "Qwen3NextForCausalLM starts with H2O" in said
    assert "compressed: 2 with full attention, 2 KV heads of size 32" in said
    assert "left alone: 2 with a state" in said and "blocks: 288 tokens" in said
    assert "for one rank: --tensor-parallel-size 2 is not looked at" in said
    # A page holds the 64 numbers of K and V of 288 tokens and 2 KV heads, and 8 bytes
    # of state for each; both groups have one in each of 2 layers for a block. Of 1024
    # tokens stock has 4 blocks, H2O 1, and a state 2.
    page = 288 * 2 * 64 * 2
    stock, block = (4 + 2) * 2 * page, 2 * (page + 288 * 2 * 8)
    assert f"{stock / 2**20:.1f} MiB of KV cache with stock" in said
    after, reading = ((n + 2) * block / 2**20 for n in (1, 2 + 1))  # chunks of 576
    assert f"with H2O {after:.1f} MiB after its prompt (288 tokens)" in said
    assert f"(288 tokens), {reading:.1f} MiB for a moment at the prompt's end" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [
                "--speculative-config",
                '{"method": "ngram_gpu", "num_speculative_tokens": 2}',
            ],
            "refused: H2O does not support --speculative-config with method='ngram_",
        ),
        (["--kv-policy", "full"], "refused: --kv-policy is 'full'"),
        (["--additional-config", '{"h2o": {"budget": 0}}'], "refused: h2o_budget .* 0"),
        (["--max-model-len", "99999"], "refused: .*max_model_len"),
    ],
)
def test_what_is_refused_is_said_with_the_option(tmp_path, capsys, options, said):
    try:
        with pytest.raises(SystemExit, match=said):
            main([str(save_llama(tmp_path)), *options])
    finally:
        logging.disable(logging.NOTSET)
    assert not capsys.readouterr().out


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "there is no such folder or file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "names",
    [
        ["gpt-oss 20B", "BLOOM 7B1"],
        pytest.param([*FAMILIES], marks=pytest.mark.slow),
    ],
)
def test_the_table_of_families_is_what_the_command_finds(names):
    rows, errors, status = run("tests.models.families", *names)
    assert status == 0, errors
    found = rows.splitlines()
    assert len(found) == len(names)
    table = TABLE.read_text().splitlines()
    assert [row for row in found if row not in table] == []

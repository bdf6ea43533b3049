"""README and docs: what they link to is there, and every option is in its table."""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_h2o.attention.ops import triton
from vllm_h2o.plugin.engine_args import add_cli_group
from vllm_h2o.plugin.validate import check_kernels
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.presets import POLICY_NAMES, PRESETS

ROOT = Path(__file__).parents[1]


def build_site(folder):
    """Make the docs' site in a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": "https://host/us"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_site_is_built_without_a_warning(tmp_path):
    """Every link and anchor leads somewhere, every page is in the navigation."""
    build_site(tmp_path)
    start = (tmp_path / "index.html").read_text()
    assert "vllm serve" in start and 'href="options/"' in start
    # What is no page is in the repository.
    assert 'href="https://host/us/blob/main/LICENSE"' in start
    assert 'src="pictures/row.svg"' in start
    found = json.loads((tmp_path / "search/search_index.json").read_text())
    assert {"", "options/", "benchmarks/quality/"} <= {
        x["location"] for x in found["docs"]
    }


@pytest.mark.check
def test_links_of_the_patch_lead_somewhere():
    file = ROOT / "patches/README.md"
    for link in re.findall(r"\]\(([^)#]+)", file.read_text()):
        assert link.startswith("https://") or (file.parent / link).exists()


@pytest.mark.check
def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120


def test_all_options_and_presets_are_in_their_tables():
    parser = FlexibleArgumentParser(formatter_class=argparse.HelpFormatter)
    add_cli_group(parser)
    flags = {
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith(("--h2o", "--kv-policy", "--enable-h2o"))
    }
    text = (ROOT / "docs/options.md").read_text()
    assert set(re.findall(r"^\| `(--[a-z0-9-]+)`", text, re.MULTILINE)) == flags
    presets = re.findall(r"^\| `([a-z][a-z0-9-]*)` \|", text, re.MULTILINE)
    assert {"full", *presets} == set(POLICY_NAMES)


def test_the_matrix_says_which_presets_gpus_refuse():
    """README's, by what the kernels for GPUs have."""
    text = (ROOT / "README.md").read_text().partition("## What it works with")[2]
    refused = {}
    for features, on_gpu in re.findall(
        r"^\| presets? ([^|]+)\|[^|]+\|([^|]+)\|", text, re.MULTILINE
    ):
        for name in re.findall(r"`([a-z0-9-]+)`", features):
            assert name not in refused, f"{name} is in two rows"
            refused[name] = on_gpu.strip() == "refused"
    assert set(refused) == set(PRESETS)
    for name, config in PRESETS.items():
        if refused[name]:
            with pytest.raises(ValueError, match="has no kernel"):
                check_kernels(config, triton, "CUDA")
        else:
            check_kernels(config, triton, "CUDA")


@pytest.mark.check
def test_the_tables_have_the_defaults_and_the_presets():
    text = (ROOT / "docs/options.md").read_text()
    for option in dataclasses.fields(H2OConfig):
        if option.metadata:
            flag = f"--h2o-{option.name.replace('_', '-')}"
            (shown,) = re.findall(
                rf"^\| `{flag}` \|[^|\n]*\|([^|\n]*)\|", text, re.MULTILINE
            )
            assert shown.strip(" `") == str(option.default), flag
    for name, preset in PRESETS.items():
        (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", text, re.MULTILINE)
        assert [cell.strip() for cell in row.split("|")] == cells_of(preset)


def cells_of(preset):
    """A preset's row; what only scores need is left out where there are none."""
    recent = {0.0: "one block", 1.0: "all but the sinks"}
    of_attention = preset.observation_window, preset.pooling
    of_scores = (
        preset.prompt_score,
        *(("", "") if preset.gated else of_attention),
        preset.score,
        f"{preset.score_decay:g}",
    )
    return [
        recent.get(preset.recent_ratio, str(preset.recent_ratio)),
        str(preset.sinks),
        *(str(value) if preset.keeps_heavy_set else "" for value in of_scores),
        preset.head_budgets,
    ]

"""README and docs: what they link to is there, and every option is in its table."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_h2o.plugin.engine_args import add_cli_group
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.presets import POLICY_NAMES, PRESETS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "patches/README.md"]
PAGES += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))


@pytest.mark.check
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    file = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)", file.read_text()):
        if not link.startswith("https://"):
            assert (file.parent / link).exists(), f"{page} links to {link}"


@pytest.mark.check
def test_every_page_is_linked_to():
    linked = set()
    for page in PAGES:
        file = ROOT / page
        for link in re.findall(r"\]\(([^)#]+)", file.read_text()):
            linked.add((file.parent / link).resolve())
    assert {p for p in PAGES if (ROOT / p).resolve() not in linked} == {"README.md"}


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

"""Questions that are known, or asked later, of one engine with several budgets."""

import json

import pytest

from benchmarks import retrieval


def test_the_full_cache_is_asked_first():
    asked = [(way["budget"], way["known"]) for way in retrieval.ways(["50%", "20%"])]
    assert asked[0] == ("full", True)
    assert asked[1:] == [
        ("50%", True), ("20%", True), ("50%", False), ("20%", False)
    ]  # fmt: skip


def test_short_texts_are_not_for_ruler(capsys):
    short = ["--lengths", "300", "--output", "x.json", "--tasks", "decoys"]
    assert retrieval.parse_args(short).tasks == ["decoys"]
    with pytest.raises(SystemExit):
        retrieval.parse_args([*short, "vt"])
    assert "--lengths has 300: RULER's tasks need 1024" in capsys.readouterr().err


@pytest.mark.slow
def test_budgets_are_what_was_asked_for(tmp_path):
    """Prompts are read once; the memory of each way is another."""
    output = tmp_path / "found.json"
    asked = "--tasks passkey counting --least 0.9 --per-depth 1 --budgets 30% 15%"
    options = f"--lengths 900 {asked} --output {output}"
    retrieval.main(options.split())
    results = json.loads(output.read_text())["results"]
    known, unknown = results[:5], results[5:]
    assert [x["task"] for x in known] == ["passkey"] * 5
    assert [x["task"] for x in unknown] == ["counting"], "the full cache can not"
    held = [max(s["tokens_held"] for s in x["samples"]) for x in known]
    evicted = [min(s["tokens_evicted"] for s in x["samples"]) for x in known]
    assert held[0] > held[1] > held[2] and held[1:3] == held[3:]
    assert evicted[0] == 0 < min(evicted[1:])
    assert known[0]["right"] == 5

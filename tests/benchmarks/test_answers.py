"""Answers that a program judges: what is asked, and what counts as right."""

import gzip
import json
import zipfile

import pytest
import torch

from benchmarks import answers
from benchmarks.random_score import OPTIONS, Random
from tests.engine.tiny_models import save_reading_llama
from vllm_h2o.policy.methods import METHODS
from vllm_h2o.policy.presets import resolve_config


@pytest.fixture
def gsm8k(tmp_path):
    path = tmp_path / "test.jsonl"
    rows = [
        {"question": f"How much is {i} + 1?", "answer": f"<<{i}+1>>It is\n#### {i + 1}"}
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_number_behind_the_mark_counts(gsm8k):
    first, second, *_ = problems = answers.gsm8k(100, gsm8k)
    assert len(problems) == 4 and len(answers.gsm8k(2, gsm8k)) == 2
    assert first.prompt.count("Question: ") == answers.EXAMPLES + 1
    assert first.prompt.endswith("Question: How much is 0 + 1?\nAnswer:")
    assert "Answer: It is\n#### 12" in first.prompt and "<<" not in first.prompt
    assert first.is_right(" It is\n#### 1") and not second.is_right("#### 1")
    assert not first.is_right("It is 1")
    said = (
        "#### $1,234.50",
        "#### -7",
        "####12 apples",
        "12",
        r"is \(\boxed{\$180}\).",
        "#### 1. First\nIt is 18 , so\n#### **19**",
        "#### ,",
    )
    expected = [1234.5, -7.0, 12.0, None, 180.0, 19.0, None]
    assert [answers.number_of(x) for x in said] == expected
    (asked,) = answers.gsm8k(1, gsm8k, chats=True)
    assert asked.prompt.startswith("How much is 0 + 1?\nThink")
    assert asked.is_right(r"\boxed{1}")


def test_what_the_model_writes_is_run(tmp_path, monkeypatch):
    row = {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1) == 2"}
    row |= {"entry_point": "f", "canonical_solution": "    return x + 1\n"}

    def download(requirement, folder):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
            lines = "\n".join([json.dumps(row)] * 9).encode()
            archive.writestr(answers._DATA, gzip.compress(lines))
        return tmp_path / "x.whl"

    monkeypatch.setattr(answers, "download", download)
    (problem,) = answers.humaneval(5)
    assert problem.prompt.count("return x + 1") == answers.EXAMPLES
    assert problem.prompt.endswith("def f(x):\n")
    assert problem.is_right("    return x + 1") and not problem.is_right("    return x")


def test_programs_have_limits(monkeypatch):
    assert not answers.runs("x = bytearray(2**31)")
    assert answers.runs("print(1)") and not answers.runs("raise ValueError")
    monkeypatch.setattr(answers, "_SECONDS", 1)
    assert not answers.runs("while True: pass")


def test_gsm8k_needs_its_file(capsys):
    with pytest.raises(SystemExit):
        answers.parse_args(["--tasks", "gsm8k", "--output", "x"])
    assert "needs --gsm8k" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        answers.parse_args(["--chats", "--gsm8k", "x", "--output", "x"])
    assert "--chats is for --tasks gsm8k" in capsys.readouterr().err


def test_a_random_score_is_drawn_once_of_a_key(monkeypatch):
    monkeypatch.setitem(METHODS, "random", Random)
    options = {name.removeprefix("h2o_"): x for name, x in OPTIONS.items()}
    config = resolve_config(options.pop("kv_policy"), None, options)
    method, keys = config.method, torch.randn(2, 5000, 64)
    drawn = method.start(keys, keys, torch.arange(5000))["attention"]
    again = method.start(keys[:, 7:9], keys, torch.arange(2))["attention"]
    assert torch.equal(drawn[:, 7:9], again)
    assert drawn.min() >= 0 and drawn.max() < 1
    for head in drawn:
        assert torch.histc(head, 10, 0, 1).sub(500).abs().max() < 120
    before = {"attention": drawn.clone()}
    method.observe(before, torch.rand(2, 3, 4, 5000))
    assert torch.equal(method.score(before, None), drawn)


@pytest.mark.slow
@pytest.mark.engine
def test_systems_answer_one_after_the_other(tmp_path, gsm8k, capsys):
    model, output = save_reading_llama(tmp_path / "model"), tmp_path / "found.json"
    options = f"--model {model} --gsm8k {gsm8k} --tasks gsm8k --output {output}"
    options += " --max-tokens 400 --budgets 20% --limit 3"
    options += " --policies streaming random"
    answers.main([*options.split(), "--engine-args", '{"max_model_len": 1024}'])
    full, ours, drawn = json.loads(output.read_text())["systems"]
    assert (full["system"], ours["system"], ours["budget"]) == (
        "stock", "streaming", "20%"
    )  # fmt: skip
    said = {x["gsm8k"][0]["answer"] for x in (full, ours, drawn)}
    assert len(said) == 3, "each evicts otherwise"
    assert {len(full["gsm8k"]), len(ours["gsm8k"])} == {3}
    assert "gsm8k, streaming 20%: 0 of 3 right (+0.0%" in capsys.readouterr().out

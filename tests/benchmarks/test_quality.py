"""The quality harness: texts, questions, records, the CSV; one real cell."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.quality import unseen
from benchmarks.quality.__main__ import (
    FIELDS,
    chosen,
    csv_rows,
    done,
    key_of,
    parse_args,
    read,
    unknown_part,
)
from benchmarks.quality.cells import (
    BLOCK_SIZE,
    ENGINE,
    FULL,
    LOSS,
    PROMPT_ONLY,
    RETRIEVAL,
    Cell,
    common_prefix,
    repetition_rate,
    run,
    run_apart,
)
from benchmarks.quality.grid import grid, tokens_of
from benchmarks.quality.plot import divergences, draw, draw_models, loss_deltas
from benchmarks.quality.reading import ForcedRecord, write_reference
from benchmarks.quality.ruler import TASKS as RULER_TASKS
from benchmarks.quality.ruler import ruler_questions
from benchmarks.quality.systems import system_of
from benchmarks.quality.table import (
    divergence_table,
    interval,
    interval_table,
    loss_table,
    retrieval_table,
)
from benchmarks.quality.tasks import RECIPES, questions
from benchmarks.quality.texts import KINDS, texts
from benchmarks.report import append_rows
from benchmarks.smollm2 import ensure_model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_model())


def test_models_are_beside_each_other_at_equal_memory(tmp_path):
    """In int8 a fifth of the bytes has more tokens; of equal rows the first counts."""
    model = "smollm2-135m-instruct"
    names = "policy", "system", "budget_fraction", "value", "model", "metric"
    rows = [
        dict(zip(names, row, strict=True))
        for row in (
            ("h2o", "vllm_h2o", "0.2000", "0.02", model, "kl_nats"),
            ("h2o", "vllm_h2o", "0.2000", "0.9", model, "kl_nats"),
            ("h2o", "vllm_h2o", "0.1000", "0.3", model, "kl_nats"),
            ("h2o int8", "vllm_h2o", "0.3500", "0.01", model, "kl_nats"),
            ("h2o int8", "vllm_h2o", "0.1750", "0.3", model, "kl_nats"),
            ("snapkv", "kvpress", "0.2008", "0.2", model, "kl_nats"),
            ("tova", "kvpress", "0.2000", "7", model, "loss_delta_nats"),
        )
    ]
    found = {"h2o": 0.02, "h2o int8": 0.01, "kvpress snapkv": 0.2}
    assert divergences(rows) == {model: found}
    drawn = draw_models(Path("benchmarks/results"), tmp_path)
    assert drawn.stat().st_size > 10_000


def test_texts_are_real_and_of_every_kind(tokenizer):
    found = texts(tokenizer, 512, per_kind=2)
    assert list(found) == list(KINDS)
    for kind, samples in found.items():
        assert [len(tokens) for tokens in samples] == [512, 512], kind
        assert samples[0] != samples[1]
        # Markup and encodings are gone, and the text does not repeat itself.
        text = tokenizer.decode(samples[0])
        assert "</" not in text and "\ufffd" not in text, kind
        assert repetition_rate(samples[0]) < 0.5, kind


def test_too_long_texts_are_refused(tokenizer):
    with pytest.raises(ValueError, match="only 0 texts of kind"):
        texts(tokenizer, 10**6)


@pytest.mark.parametrize("task", RECIPES)
def test_questions_hold_their_answer_at_their_depth(tokenizer, task):
    asked = questions(tokenizer, [task], 700, [0.1, 0.9], per_depth=2, seed=3)
    assert asked == questions(tokenizer, [task], 700, [0.1, 0.9], 2, seed=3)
    assert asked != questions(tokenizer, [task], 700, [0.1, 0.9], 2, seed=4)
    for question in asked:
        assert 600 < len(question.context) + len(question.question) <= 700
        (answer,) = question.answers
        assert question.share_answered_by(f" {answer}.\n") == 1
        assert question.share_answered_by(f" {answer}1") == 0
        text = tokenizer.decode(question.context)
        if task != "counting":
            where = text.index(answer) / len(text)
            assert abs(where - question.depth) < 0.2
            assert answer not in tokenizer.decode(question.question)


def test_records_measure_against_the_full_cache(tmp_path):
    torch.manual_seed(0)
    full, other = torch.randn(2, 3, 100)
    write_reference(tmp_path / "0.npy", full)
    import numpy as np

    rows = np.load(tmp_path / "0.npy")
    same, changed = ForcedRecord(), ForcedRecord()
    for i in range(3):
        same.add(full[i], 7, rows[i])
        changed.add(other[i], 7, rows[i])
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    assert same.kl == pytest.approx([0, 0, 0], abs=1e-5)
    assert changed.kl == pytest.approx(expected.tolist(), rel=1e-2)
    assert changed.full_logprobs == pytest.approx(p[:, 7].tolist(), rel=1e-3)
    assert all(same.agreed)


def test_arithmetic():
    assert repetition_rate([1, 2, 3, 4] * 3) == pytest.approx(5 / 9)
    assert repetition_rate(list(range(20))) == 0.0
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2


def arguments(full):
    return parse_args(["--full"] if full else [])


@pytest.mark.parametrize("full", [False, True])
def test_grid_is_whole_and_starts_with_the_full_cache(full):
    cells = list(grid(arguments(full), "folder"))
    for work in {cell.work for cell in cells}:
        first = next(cell for cell in cells if cell.work == work)
        assert first.policy == FULL and first.system == ENGINE
    budgets = {c.budget_tokens / c.context_tokens for c in cells if c.work == LOSS}
    assert {0.2, 0.1} <= budgets
    assert all(c.budget_tokens % BLOCK_SIZE == 0 for c in cells)
    names = [
        (c.system, c.name, c.work, c.context_tokens, c.budget_tokens, c.question_known)
        for c in cells
    ]
    assert len(set(names)) == len(names)


def test_texts_of_a_folder_in_an_engine_for_longer_ones(tokenizer, tmp_path, capsys):
    (tmp_path / "verse.txt").write_text("la " * 1600)
    found = texts(tokenizer, 700, folder=str(tmp_path))
    assert [len(ids) for ids in found["verse"]] == [700]
    options = f"--texts {tmp_path} --context 700 --max-model-len 8192".split()
    args = parse_args([*options, "--output", "rows.csv", "--budgets", "0.5"])
    full, *others = grid(args, "folder")
    assert (full.policy, full.samples) == (FULL, 512)
    assert {"h2o", "h2o uniform", "mpcache"} < {cell.label for cell in others}
    *_, once = grid(parse_args([*options, "--output", "x", "--prompt-only"]), "folder")
    assert (once.system, once.texts) == (PROMPT_ONLY, str(tmp_path))
    assert {cell.budget_tokens for cell in others} == {352}
    for cell in (full, *others):
        assert (cell.max_model_len, cell.texts) == (8192, str(tmp_path))
    with pytest.raises(SystemExit):
        parse_args(options)
    assert "need an --output" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args(["--budgets", "0.5"])
    assert "--budgets needs --texts" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no .txt files: give a folder"):
        texts(tokenizer, 700, folder=str(tmp_path / "nothing"))


def test_chunks_have_so_many_budgets(tmp_path):
    options = f"--chunks 2 4 --output x --texts {tmp_path} --budgets 0.1".split()
    full, whole, *chunked = grid(parse_args(options), "folder")
    of_model = {"resident_dtype": "model"}
    assert (full.policy, whole.label, whole.options) == (FULL, "h2o", of_model)
    assert [cell.options for cell in chunked] == [
        of_model | {"prefill_chunk": 512}, of_model | {"prefill_chunk": 1024}
    ]  # fmt: skip
    known = [cell.question_known for cell in grid(parse_args(options[:5]), "folder")]
    assert known == [True] * 3 + [False] * 3


def test_only_some_cells_and_what_they_refer_to():
    cells = list(grid(arguments(full=False), "folder"))
    assert chosen(cells, None) == cells
    some = chosen(cells, ["policy='tova'"])
    assert {cell.policy for cell in some} == {FULL, "tova"}
    assert {cell.work for cell in some} == {LOSS}, "answers refer to nothing"


def test_questions_are_of_all_lengths(tokenizer, capsys):
    """The answer is in the context, and not in the question."""
    asked = "--questions 1024 2048 --output x.csv".split()
    cells = list(grid(parse_args(asked), "folder"))
    assert [c.context_tokens for c in cells if c.policy == FULL] == [1024, 2048]
    assert {tuple(c.tasks) for c in cells} == {RULER_TASKS}
    named = [*asked, *"--tasks decoys --dtype bfloat16 --budgets .2 .1".split()]
    some = list(grid(parse_args(named), "folder"))
    assert {(*c.tasks, c.dtype) for c in some} == {("decoys", "bfloat16")}
    budgets = {c.budget_tokens for c in some if c.context_tokens == 2048}
    assert budgets == {0, 416, 192}
    known = {
        key_of(row) for row in csv_rows(some[0], [("exact_match_decoys_known", 1, 20)])
    }
    assert done(some[0], known)
    both = replace(some[0], tasks=["decoys", "vt"])
    assert not done(both, known) and unknown_part(both, known).tasks == ["vt"]
    with pytest.raises(SystemExit):
        parse_args(["--full", "--dtype", "bfloat16"])
    assert "--dtype needs --texts" in capsys.readouterr().err
    short = "--questions 512 --output x.csv --tasks needles".split()
    assert parse_args(short).questions == [512]
    with pytest.raises(SystemExit):
        parse_args([*short, "vt"])
    assert "--questions has 512: vt need 1024 or more" in capsys.readouterr().err
    assert {(c.budget_tokens, c.question_known) for c in cells if c.budget_tokens} == {
        (n // part, known)
        for n in (1024, 2048)
        for part in (2, 4, 8)
        for known in (True, False)
    }
    for task in RULER_TASKS:
        first, second = ruler_questions(tokenizer, task, 1024, 2, seed=0)
        again, _ = ruler_questions(tokenizer, task, 1024, 2, seed=0)
        assert first == again != second
        text, asked = map(tokenizer.decode, (first.context, first.question))
        assert len(first.context) < 1080 and asked.count("<|im_start|>assistant") == 1
        assert all(text.count(answer) >= 1 for answer in first.answers)
        assert not any(answer in asked for answer in first.answers)
        assert first.share_answered_by(" ".join(first.answers).upper()) == 1
        assert first.share_answered_by("nothing") == 0


def test_csv_has_the_schema_and_is_resumed(tmp_path):
    path = tmp_path / "quality.csv"
    cell = Cell(ENGINE, "h2o", LOSS, 512, 2560, 1024, label="h2o uniform")
    assert cell.samples == 8192
    measured = [("loss_nats", 3.25, 8192), ("loss_delta_nats", 0.02, 8192)]
    append_rows(path, csv_rows(cell, measured), FIELDS)
    with path.open() as file:
        assert next(csv.reader(file)) == FIELDS
    known = {key_of(row) for row in read(path)}
    assert done(cell, known)
    assert not done(Cell(ENGINE, "h2o", LOSS, 256, 2560, 1024), known)
    # The quick grid reads fewer tokens of the same texts: another measurement.
    quick = Cell(ENGINE, "h2o", LOSS, 512, 2560, 256, label="h2o uniform")
    assert not done(quick, known)
    append_rows(path, csv_rows(quick, [("loss_delta_nats", 0.9, 2048)]), FIELDS)
    assert loss_deltas(read(path)) == {"h2o uniform": [(0.2, 0.02)]}
    assert loss_table(read(path)).endswith("| h2o uniform | +0.020 |")
    (picture,) = draw(path, tmp_path)
    assert picture.stat().st_size > 5000


def test_intervals_are_over_texts():
    cell = Cell(PROMPT_ONLY, "kvzip", LOSS, 256, 2560, 512)
    measured = [("loss_delta_nats", 0.2, 4096)]
    measured += [(f"loss_delta_nats_{i}", 0.1 * i, 512) for i in range(5)]
    *_, line = interval_table(csv_rows(cell, measured)).split("\n")
    low, high = interval([0.1 * i for i in range(5)])
    assert line == f"| prompt only kvzip | +0.200 [{low:.3f}, {high:.3f}] |"
    assert 0 < low < 0.15 and 0.25 < high < 0.4


def test_divergence_stands_beside_loss_by_model():
    rows = []
    for model, kl in (("/models/one", 0.05), ("/models/two", 0.0123)):
        cell = Cell(ENGINE, "h2o", LOSS, 512, 2560, 512, model=model)
        measured = [("kl_nats", kl, 4096), ("top1_agreement", 0.912, 4096)]
        rows += csv_rows(cell, [*measured, ("loss_delta_nats", 0.041, 4096)])
    rows += csv_rows(replace(cell, budget_tokens=256), [("kl_nats", 0.2, 4096)])
    *_, one, two = divergence_table(rows).split("\n")
    assert one == "| one, h2o | 0.0500, 91.2%, +0.041 |  |"
    assert two == "| two, h2o | 0.0123, 91.2%, +0.041 | 0.2000 |"


def test_the_retrieval_table_counts_right_answers():
    cell = Cell(ENGINE, "h2o", "retrieval", 192, 960)
    measured = [("exact_match_passkey_known", 0.85, 20)]
    measured += [("exact_match_passkey_known_depth_0.1", 1.0, 4)]
    *_, line = retrieval_table(csv_rows(cell, measured)).split("\n")
    assert line == "| h2o 20% | 17 of 20 |"
    *_, line = retrieval_table(csv_rows(cell, measured), intervals=True).split("\n")
    assert line == "| h2o 20% | 17 of 20 [14, 20] |"


def test_budgets_are_whole_blocks():
    assert [tokens_of(f, 2560) for f in (0.5, 0.2, 0.1, 0.05)] == [1280, 512, 256, 128]


@pytest.fixture
def here(monkeypatch):
    """Engines run in this process, and leave room for others."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.engine
@pytest.mark.slow
def test_the_full_cache_answers_whenever_it_is_asked(tokenizer, here):
    """A question ends the user's turn: its stop token must not end the request."""
    asked = questions(tokenizer, ["passkey"], 320, [0.5], per_depth=3, seed=0)
    texts = [q.context for q in asked], [q.question for q in asked]
    engine = system_of(Cell(ENGINE, FULL, RETRIEVAL, 0, 320))
    first = engine.answers(*texts, 12, question_known=True)
    later = engine.answers(*texts, 12, question_known=False)
    engine.close()
    assert later == first
    answers = tokenizer.batch_decode(later)
    assert sum(q.share_answered_by(a) for q, a in zip(asked, answers, strict=True)) >= 2
    assert not any(engine.stops & set(answer) for answer in later)


@pytest.mark.slow
@pytest.mark.engine
def test_a_cell_runs_and_eviction_costs_something(tmp_path, here):
    """The first in a process of its own, as the command does it."""
    work = {"context_tokens": 192, "scored_tokens": 48, "references": str(tmp_path)}
    full = dict(map(_pair, run_apart(Cell(ENGINE, FULL, LOSS, 0, **work))))
    whole = Cell(ENGINE, "h2o", LOSS, 256, **work)
    tiny = Cell(ENGINE, "streaming", LOSS, 64, **work)
    whole_rows, tiny_rows = (dict(map(_pair, run(cell))) for cell in (whole, tiny))
    assert 1.0 < full["loss_nats"] < 6.0
    assert whole_rows["loss_delta_nats"] == pytest.approx(0.0, abs=1e-3)
    assert whole_rows["top1_agreement"] > 0.99
    assert tiny_rows["kl_nats"] > 0.01 > whole_rows["kl_nats"]
    delta = tiny_rows["loss_nats"] - full["loss_nats"]
    assert tiny_rows["loss_delta_nats"] == pytest.approx(delta, abs=1e-3)
    assert not math.isnan(delta)


def _pair(row):
    return row[0], row[1]


def test_unseen_texts_begin_a_quarter_into_their_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_H2O_CACHE", str(tmp_path))
    for package, name, text in (
        ("pci.ids", "usr/misc/pci.ids", "one\ntwo\nthree\nfour\n"),
        ("postgresql-doc-15", "html/app-psql.html", "<p>a</p>\n" * 12),
    ):
        file = tmp_path / "texts" / package / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    folder = tmp_path / "out"
    unseen.main([str(folder), "--kinds", "devices", "reference"])
    assert (folder / "devices.txt").read_text() == "three\nfour\n"
    assert (folder / "reference.txt").read_text().split() == ["a"] * 9
    assert capsys.readouterr().out.count(".txt") == 2
    file.unlink()
    with pytest.raises(ValueError, match="has 0 files html/app-psql.html"):
        unseen.unseen_text("reference")

"""Measured profiles are found by what the model answers, whole or not at all."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from vllm_h2o.calibration import cache, texts
from vllm_h2o.calibration.cache import LEAST_COSINE, keep
from vllm_h2o.calibration.progress import Progress
from vllm_h2o.policy.profile import HeadProfile, gate_in_json


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_H2O_CACHE", str(tmp_path))
    return tmp_path / "heads"


def profile(error, tokens=1024):
    return HeadProfile([64, 512], [[[error, 0.1]] * 2] * 3, context_tokens=tokens)


def answers(cosine=1.0):
    """With this cosine to the answers (1, 0)."""
    return [cosine, math.sqrt(1 - cosine**2)]


def find(cosine=1.0, layers=3, heads=2):
    found = cache.find(answers(cosine), layers, heads)
    return found and found[1]


def test_the_nearest_answers_count_if_they_are_near():
    assert find() is None
    for cosine, error in ((1.0, 0.5), (0.99, 0.6), (0.9, 0.7)):
        keep(answers(cosine), profile(error))
    assert find(1.0) == profile(0.5)
    assert find(0.9995) == profile(0.5)
    assert find(0.991) == profile(0.6)
    assert math.cos(math.acos(0.95) - math.acos(0.9)) < LEAST_COSINE
    assert find(0.95) is None
    assert find(layers=4) is None and find(heads=1) is None


def test_of_files_of_one_model_the_one_from_longer_texts_counts(folder):
    for tokens, cosine in ((1024, 1.0), (2048, 1 - 1e-7), (512, 1 - 2e-7)):
        keep(answers(cosine), profile(0.5, tokens))
    assert len(list(folder.iterdir())) == 3
    assert find() == profile(0.5, 2048)
    keep(answers(), profile(0.6, 4096))
    assert find() == profile(0.6, 4096)
    assert len(list(folder.iterdir())) == 3, "in place of the last"


def test_of_files_of_one_model_one_with_a_gate_counts_where_it_is_needed():
    gated = replace(profile(0.5, 512), gate=gate_in_json([[[1.0]] * 2] * 3, 0.5))
    keep(answers(), gated)
    keep(answers(1 - 1e-7), profile(0.6, 2048))
    assert find() == profile(0.6, 2048)
    found = cache.find(answers(), 3, 2, gated=True)
    assert found and found[1] == gated


def test_a_profile_of_other_texts_is_not_found(folder, monkeypatch):
    keep(answers(), profile(0.5))
    monkeypatch.setattr(texts, "digest", lambda: "01234567")
    assert find() is None
    keep(answers(), profile(0.6))
    assert find() == profile(0.6)
    assert len(list(folder.iterdir())) == 2


def test_what_was_read_is_of_these_texts_and_this_version(folder, monkeypatch):
    """And goes when the profile is kept; another model's stays."""
    mine = answers(), 3, 2, [[1, 2], [3, 4]]
    path = cache.progress_folder(*mine)
    assert path == cache.progress_folder(*mine)
    others = [
        cache.progress_folder(answers(0.9), 3, 2, mine[3]),
        cache.progress_folder(answers(), 3, 2, [[1, 2], [3, 5]]),
        cache.progress_folder(answers(), 3, 2, [[1, 2, 3, 4]]),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(cache, "VERSION", cache.VERSION + 1)
        others.append(cache.progress_folder(*mine))
    assert len({path, *others}) == 5
    for each in (path, *others):
        Progress(each).save("read-0", {"errors": np.ones(2)})
    kept = keep(answers(), profile(0.5))
    assert {*folder.iterdir()} == {kept, others[0]}


@pytest.mark.parametrize("damage", [b"", b"PK", b"\0" * 100])
def test_what_is_damaged_of_what_was_read_is_read_again(folder, damage):
    progress = Progress(folder)
    assert progress.load("read-0") is None
    progress.save("read-0", {"errors": np.arange(3.0), "count": np.array(5)})
    found = progress.load("read-0")
    assert found["errors"].tolist() == [0.0, 1.0, 2.0] and int(found["count"]) == 5
    (folder / "read-0.npz").write_bytes(damage)
    assert progress.load("read-0") is None


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 1},
        {"answers": None},
        {"answers": ["x", 0.0]},
        {"answers": [10**400, 0.0]},
        {"profile": None},
        {"profile": {"grid_tokens": [64], "errors": [[[math.nan]] * 2] * 3}},
        {"profile": {"grid_tokens": [64], "errors": [[[0.1]] * 2] * 4}},
        "cut",
        "no dictionary",
    ],
)
def test_what_is_no_profile_is_left_alone(folder, damage):
    path = keep(answers(), profile(0.5))
    if isinstance(damage, dict):
        content = json.loads(path.read_text()) | damage
        path.write_text(json.dumps(content))
    else:
        whole = path.read_text()
        path.write_text(whole[: len(whole) // 2] if damage == "cut" else "[]")
    assert find() is None
    keep(answers(), profile(0.5))
    assert find() == profile(0.5)


def test_a_file_that_can_not_be_written_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        keep(answers(), profile(0.5))
    assert not list(folder.iterdir())


def test_who_keeps_at_once_keeps_whole_files(folder):
    profiles = [profile(0.5), profile(0.6)] * 40
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(lambda each: keep(answers(), each), profiles))
    assert find() in profiles
    assert list(folder.iterdir()) == list(set(kept))
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o644}

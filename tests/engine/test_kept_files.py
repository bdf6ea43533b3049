"""What is kept in files: an engine goes on from it as from its pool."""

import os

import pytest
import torch

from tests.engine.helpers import answers, assert_pool_whole, engine, greedy
from tests.engine.tiny_models import random_prompts, save_heads, save_llama
from vllm_h2o import stats

pytestmark = pytest.mark.engine

NUM_TOKENS = 24
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_keep": "end",
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,
}
CHUNKS = {
    "h2o_budget": "10%",
    "h2o_min_budget": 32,
    "h2o_prefill_chunk": 128,
    "h2o_resident_dtype": "int8",
}
CASES = {
    "by head": {"h2o_budget": 96},
    "in int8, chunks, a share that grows": CHUNKS,
    "of prompts": {"h2o_budget": 96, "h2o_keep": "prompt", "kv_policy": "gate"},
    "no heavy set": {"h2o_budget": 64, "kv_policy": "streaming"},
    "attention": {"h2o_budget": 96, "kv_policy": "h2o-paper"},
    "moved keys": {
        "h2o_budget": 64,
        "h2o_prefill_chunk": 128,
        "h2o_positions": "cache",
        "hf_overrides": {"max_position_embeddings": 480},
    },
}
GOES_ON = {"continue": True, "report": True}


SMALL = OPTIONS | CASES["by head"]
SMALL |= {"max_model_len": 640, "num_gpu_blocks_override": 26}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = save_llama(tmp_path_factory.mktemp("llama"))
    save_heads(folder)
    return folder


@pytest.fixture
def kept(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    return folder


def next_turns(llm, seed=0):
    """Conversations of two prompts, up to their second questions."""
    prompts = random_prompts(300, 170, seed=seed)
    told = answers(llm, prompts, greedy(NUM_TOKENS))
    more = random_prompts(60, 150, seed=seed + 1)
    return [a + b + c for a, b, c in zip(prompts, told, more, strict=True)]


def outcomes(llm, turns, wishes=GOES_ON):
    """Of each turn its tokens, how many it has not read, what is held at its end."""
    found = []
    for turn in turns:
        llm.collective_rpc("probe_watch")
        asked = greedy(NUM_TOKENS, extra_args={"h2o": wishes})
        (output,) = llm.generate({"prompt_token_ids": turn}, asked, use_tqdm=False)
        looks = [("probe_survivors",), ("probe_values", "keys"), ("probe_values",)]
        held = [
            next(iter(llm.collective_rpc(look, args=args)[0].values()))
            for look, *args in looks
        ]
        report = output.kv_transfer_params["h2o"]
        tokens = list(output.outputs[0].token_ids)
        found.append((tokens, report.get("tokens_continued", 0), held))
        assert_pool_whole(llm)
    return found


def assert_same(found, expected):
    """To the bit."""
    for (tokens, gone_on, held), mine in zip(expected, found, strict=True):
        assert (tokens, gone_on, held[0]) == (mine[0], mine[1], mine[2][0])
        for part, other in zip(held[1:], mine[2][1:], strict=True):
            for layer, others in zip(part, other, strict=True):
                assert all(map(torch.equal, layer, others))


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (i > 1)) for i, x in enumerate(CASES)],
)
@pytest.mark.rule("R27")
def test_another_engine_goes_on_as_the_pool_does(llama, kept, name):
    options = OPTIONS | CASES[name] | {"h2o_keep_folder": str(kept)}
    with engine(llama, **options) as llm:
        turns = next_turns(llm)
        expected = outcomes(llm, turns)
        assert min(gone_on for _, gone_on, _ in expected) >= 170
        assert stats(llm)["loaded_requests"] == 0
    assert {file.stat().st_mode & 0o777 for file in kept.rglob("*.*")} == {0o600}
    with engine(llama, **options) as llm:
        assert_same(outcomes(llm, turns), expected)
        counted = stats(llm)
        assert counted["loaded_requests"] == len(turns)
        assert counted["failed_loads"] == 0
    with engine(llama, **options | {"h2o_sinks": 3}) as llm:
        outcomes(llm, turns)
        assert stats(llm)["loaded_requests"] == 0, "of another policy"


def test_a_small_pool_holds_a_long_conversation(llama, kept):
    """Of which the pool has lost what was held, each time: others have been there."""
    with engine(llama, **SMALL, h2o_keep_folder=str(kept)) as llm:
        (turn,) = random_prompts(200)
        for number in range(5):
            before = stats(llm)
            asked = greedy(NUM_TOKENS, extra_args={"h2o": {"continue": True}})
            (told,) = answers(llm, [turn], asked)
            gone_on = stats(llm)["continued_tokens"] - before["continued_tokens"]
            assert gone_on == (number > 0) * (len(turn) - 41)
            turn = turn + told + random_prompts(40, seed=number)[0]
            fill(llm)
        assert stats(llm)["loaded_requests"] == 4
        assert_pool_whole(llm)


@pytest.mark.rule("R27")
def test_what_is_damaged_is_read_again(llama, kept):
    """Whichever byte, and whatever else may have become of a file."""
    options = SMALL | {"h2o_keep_folder": str(kept)}
    with engine(llama, **options) as llm:
        turns = next_turns(llm)
        fill(llm)
    with engine(llama, **options) as llm:
        files = sorted(kept.rglob("*.safetensors"))
        (mine,) = (file for file in files if len(turns[0]) - 61 == tokens_of(file))
        whole, other = mine.read_bytes(), next(x for x in files if x != mine)
        end = int.from_bytes(whole[:8], "little")
        places = [0, 7, 8, 9, end // 2, end, end + 8, end + 9, 2 * end, len(whole) - 1]
        damaged = [flipped(whole, place) for place in places]
        damaged += [whole[:-1], whole[: end + 8], whole[:20], b"", other.read_bytes()]
        plain = {"report": True, "keep": "none"}
        expected = outcomes(llm, turns[:1], plain)
        for content in damaged:
            put(mine, content)
            fill(llm)
            found = outcomes(llm, turns[:1], plain | {"continue": True})
            assert_same(found, expected)
            assert not mine.exists(), damaged.index(content)
        assert stats(llm)["failed_loads"] >= 4
        put(mine, whole)
        fill(llm)
        (found,) = outcomes(llm, turns[:1], plain | {"continue": True})
        assert found[1] == len(turns[0]) - 61
        mine.unlink()
        fill(llm)
        assert_same(outcomes(llm, turns[:1], plain | {"continue": True}), expected)
        llm.reset_prefix_cache()
        put(mine, whole)
        assert_same(outcomes(llm, turns[:1], plain | {"continue": True}), expected)


@pytest.mark.slow
@pytest.mark.rule("R27")
def test_two_ranks_go_on_together(llama, kept, monkeypatch):
    """Or not at all, where one of both can not read its file."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = SMALL | {"h2o_keep_folder": str(kept), "tensor_parallel_size": 2}
    options |= {"distributed_executor_backend": "mp"}
    wishes = GOES_ON | {"keep": "none"}
    with engine(llama, **options) as llm:
        turns = next_turns(llm)
        expected = outcomes(llm, turns, wishes)
    with engine(llama, **options) as llm:
        fill(llm)
        assert_same(outcomes(llm, turns, wishes), expected)
        plain = outcomes(llm, turns, {"report": True, "keep": "none"})
        for file in kept.rglob("*-1of2-*"):
            put(file, flipped(file.read_bytes(), file.stat().st_size - 9))
        fill(llm)
        assert_same(outcomes(llm, turns, wishes), plain)
        counted = stats(llm)
        assert (counted["loaded_requests"], counted["failed_loads"]) == (4, 2)
        assert not [*kept.rglob("*of2*")]


def fill(llm):
    """Have other requests take all blocks of a small pool."""
    others = random_prompts(420, 420, seed=9)
    asked = greedy(NUM_TOKENS, extra_args={"h2o": {"keep": "none"}})
    answers(llm, others, asked)


def flipped(content, place):
    """With one bit of a byte changed."""
    changed = bytearray(content)
    changed[place] ^= 1 << place % 8
    return bytes(changed)


def put(path, content):
    """At once, as the engine writes it."""
    partial = path.with_suffix(".new")
    partial.write_bytes(content)
    os.replace(partial, path)


def tokens_of(file):
    """Of how many tokens a file is."""
    from vllm_h2o.core.kept_files import _read

    entry = _read((str(file),))
    return entry and entry.snapshot.num_tokens

"""Prompts in chunks, and what a request goes on from."""

import math
import os
import random
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.core.helpers import MAX_MODEL_LEN, SMALL_POOL, Driver
from vllm_h2o.core import kept_files


@pytest.mark.rule("R17")
def test_a_chunk_is_at_least_two_budgets():
    driver = Driver(64, budget=64, prefill_chunk=16, chunk=500)
    name = driver.add(list(range(100, 300)), 20, report=True)
    rows = []
    for _ in range(3):
        rows.append(driver.schedule().h2o_plan.rows[name])
        driver.process()
    assert [(row.chunk_start, row.chunk_end) for row in rows] == [
        (0, 128), (128, 200), (128, 200)
    ]  # fmt: skip
    assert [row.is_transition for row in rows] == [True, True, False]
    assert driver.scheduler.h2o_stats.tokens_evicted == 200 - 64 + 1
    driver.drain()
    assert driver.reports[name]["tokens_held"] == 64


def test_a_prompt_within_a_chunk_is_read_as_without_chunks():
    """Its steps, its blocks and its hits."""
    plans = []
    for prefill_chunk in (0, 128):
        driver = Driver(64, budget=64, prefill_chunk=prefill_chunk)
        mine = []
        for _ in range(2):
            driver.add(list(range(100, 228)), 20)
            for _ in range(20):
                rows = driver.schedule().h2o_plan.rows.values()
                mine.append([*rows])
                mine.append(sorted(x.block_id for x in driver.pool.blocks if x.ref_cnt))
                driver.process()
            driver.drain()
        plans.append(mine)
    assert plans[0] == plans[1]


def kept_turn(driver, prompt=100, generated=20, **wishes):
    """All tokens of a request that has ended in an engine that keeps."""
    name = driver.add(list(range(1, prompt + 1)), generated, **wishes)
    driver.drain()
    return list(driver.requests[name].all_token_ids)


@pytest.mark.rule("R18")
def test_the_next_turn_goes_on_from_what_the_last_has_held():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver) + [5] * 30
    name = driver.add(turn, 10, report=True, **{"continue": True})
    plan = driver.schedule().h2o_plan
    # The last token of the answer was never computed.
    row = plan.rows[name]
    assert (row.num_computed_tokens, row.chunk_start, row.chunk_end) == (
        119,
        119,
        150,
    )
    assert row.scored_from == 100 - 20 and row.first_query == 150 - 20
    assert row.is_transition and len(plan.copies) == 4
    held = driver.pool.num_gpu_blocks - 1 - driver.pool.get_num_free_blocks()
    assert held == 3 + 4, "31 tokens from the 8th block on, and the budget"
    driver.drain()
    assert driver.reports[name]["tokens_continued"] == 119
    assert driver.scheduler.h2o_stats.continued_tokens == 119
    assert driver.scheduler.h2o_stats.kept_requests == 2
    driver.assert_pool_whole()


@pytest.mark.rule("R11")
def test_a_share_grows_while_the_next_turn_is_read():
    """At once, and where its chunk then ends: half of up to 128, 160 and 192 tokens."""
    driver = Driver(64, budget="50%", chunk=200, keep="end")
    turn = kept_turn(driver) + [5] * 60
    evicted = driver.scheduler.h2o_stats.tokens_evicted
    assert evicted == 119 - 64
    name = driver.add(turn, 10, report=True, **{"continue": True})
    first = driver.schedule().h2o_plan
    assert len(first.copies) == 4
    row, then = first.rows[name], driver.schedule().h2o_plan.rows[name]
    assert row.num_computed_tokens == row.chunk_start == 119 and row.chunk_end == 160
    assert (row.budget, row.grown_at, row.grown_from) == (80, 119, 64)
    assert (then.num_computed_tokens, then.chunk_end) == (160, 180)
    assert (then.budget, then.grown_at, then.grown_from) == (96, 160, 80)
    assert then.grown_before == 119 and row.is_transition and then.is_transition
    driver.drain()
    report = driver.reports[name]
    assert (report["tokens_continued"], report["tokens_held"]) == (119, 96)
    gone = driver.scheduler.h2o_stats.tokens_evicted - evicted
    assert gone == report["tokens_evicted"] - (119 - 64)
    driver.assert_pool_whole()


@pytest.mark.parametrize("wishes", [{"keep": "none"}, {"policy": "full"}])
def test_what_does_not_ask_for_it_is_not_kept(wishes):
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver, **wishes)
    driver.add(turn + [5] * 30, 10, **{"continue": True})
    assert not driver.schedule().h2o_plan.copies


def test_what_does_not_ask_for_it_does_not_go_on():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver)
    for asked, more in (({}, 5), ({"continue": True}, 6)):
        driver.add(turn + [more] * 30, 10, **asked)
        assert bool(driver.schedule().h2o_plan.copies) == bool(asked)
        driver.drain()


@pytest.mark.parametrize("wishes", [{"budget": 32}, {"budget": 64}])
def test_what_had_another_budget_is_not_gone_on_from(wishes):
    """Nor what had as many slots, but as its own number: they may lie otherwise."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver)
    driver.add(turn + [5] * 30, 10, **{"continue": True} | wishes)
    assert not driver.schedule().h2o_plan.copies


@pytest.mark.parametrize("is_full", [False, True])
def test_a_prefix_hit_of_more_tokens_comes_first(is_full):
    """It is exact."""
    driver = Driver(64, budget=64, chunk=200, keep="end", policy="gate")
    kept_turn(driver, 100, 1, keep="end")
    longer = list(range(1, 101)) + [7] * 90
    if is_full:
        driver.add(longer, 2, policy="full")
        driver.drain()
    driver.add(longer, 20, **{"continue": True})
    plan = driver.schedule().h2o_plan
    assert bool(plan.copies) != is_full
    assert plan.num_computed_tokens.tolist() == [176 if is_full else 100]


def test_a_stranger_does_not_go_on_from_what_is_kept():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    prompt = list(range(1, 101))
    name = driver.add(prompt, 20, salt="mine")
    driver.drain()
    turn = list(driver.requests[name].all_token_ids) + [5] * 30
    for salt, goes_on in (("mine", True), ("other", False), (None, False)):
        driver.add(turn, 10, salt=salt, **{"continue": True})
        assert bool(driver.schedule().h2o_plan.copies) == goes_on
        driver.drain()


@pytest.mark.rule("R28")
def test_a_session_goes_on_by_itself():
    """From what its own requests have left; from another's where it asks for that."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    name = driver.add(list(range(1, 101)), 20, named="mine")
    driver.drain()
    turn = list(driver.requests[name].all_token_ids)
    for asks, named, goes_on in (
        ({}, "mine", True),
        ({}, "other", False),
        ({"continue": True}, "other", True),
        ({"continue": False}, "mine", False),
        ({"policy": "full"}, "mine", False),
        ({}, None, False),
    ):
        more = [next(driver.token)] * 30
        name = driver.add(turn + more, 10, named=named, report=True, **asks)
        assert bool(driver.schedule().h2o_plan.copies) == goes_on, (asks, named)
        driver.drain()
        if goes_on:
            assert driver.reports[name]["tokens_continued"] == 119
    driver.assert_pool_whole()


def test_a_session_that_was_refused_leaves_the_engine_alone():
    """With `keep` off its name means nothing."""
    driver = Driver(64, budget=64, chunk=200)
    for _ in range(2):
        driver.add(list(range(1, 101)), 20, named="mine")
        assert not driver.schedule().h2o_plan.copies
        driver.drain()


@pytest.mark.rule("R28")
def test_what_no_turn_needs_any_more_is_given_away_first():
    """What the last turn but one has held: not a stranger's that is older."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    stranger = kept_turn(driver, 99)
    turns = told_turns(driver, list(range(1, 101)), "mine", 2)
    snapshots = driver.scheduler._continuing._snapshots
    oldest, _ = snapshots._sessions["mine"]
    gone = {block.block_id for block in oldest.snapshot.blocks}
    turns += told_turns(driver, turns[-1], "mine", 1)
    assert snapshots.held()[:2] == (3, 12), "the stranger's, and two of the session"
    free = driver.pool.free_block_queue.get_all_free_blocks()
    assert {block.block_id for block in free[: len(gone)]} == gone
    for turn in (stranger, turns[-1], turns[-2]):
        driver.add(turn + [5], 2, **{"continue": True})
        assert driver.schedule().h2o_plan.copies
        driver.drain()
    driver.assert_pool_whole()


def told_turns(driver, turn, session, count):
    """What so many turns of a session begin with, each from the one before."""
    told = []
    for _ in range(count):
        name = driver.add(turn, 20, named=session)
        driver.drain()
        turn = [*driver.requests[name].all_token_ids, 5]
        told.append(turn)
    return told


@pytest.mark.rule("R28")
@pytest.mark.parametrize("other", ["mine", "fork"])
def test_what_several_have_gone_on_from_stays(other):
    """Turns of the same session, or of another that asks for it."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    begins = told_turns(driver, list(range(1, 101)), "mine", 1)[0]
    asks = {"continue": True} if other == "fork" else {}
    branches = []
    for more in ([6] * 9, [7] * 9):
        name = driver.add(begins + more, 20, named=other, **asks)
        assert driver.schedule().h2o_plan.copies
        driver.drain()
        branches.append([*driver.requests[name].all_token_ids, 5])
    for turn in branches:
        told_turns(driver, turn, other, 2)
    name = driver.add(begins + [8] * 9, 20, named="mine")
    assert driver.schedule().h2o_plan.copies, "the third goes on from there too"
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.rule("R28")
def test_only_so_many_sessions_are_kept(monkeypatch):
    driver = Driver(64, budget=64, chunk=200, keep="end", keep_sessions=2)
    turns = {}
    for name in ("a", "b", "a", "c"):
        known = turns.get(name, [ord(name), *range(100)])
        request = driver.add(known, 20, named=name)
        driver.drain()
        turns[name] = [*driver.requests[request].all_token_ids, 5]
    for name, goes_on in (("b", False), ("a", True), ("c", True)):
        request = driver.add(turns[name], 2, named=name, keep="none")
        assert bool(driver.schedule().h2o_plan.copies) == goes_on, name
        driver.drain()


@pytest.mark.parametrize("files", [False, True])
def test_what_is_old_is_of_no_use(files, monkeypatch):
    """Since it was used last."""
    driver = Driver(64, budget=64, chunk=200, keep="end", files=files, keep_seconds=60)
    turn = kept_turn(driver) + [5]
    driver.draw.random = lambda: 0.5  # no file is lost, and none fails
    clock, clocks = [0.0], (time.monotonic, time.time)
    monkeypatch.setattr("time.monotonic", lambda: clocks[0]() + clock[0])
    monkeypatch.setattr("time.time", lambda: clocks[1]() + clock[0])
    utime = os.utime
    monkeypatch.setattr("os.utime", lambda path: utime(path, (time.time(),) * 2))
    for later, goes_on in ((50, True), (100, True), (170, False)):
        clock[0] = later
        if files:
            written(driver)
            driver.pool.reset_prefix_cache()  # what the pool has
        driver.add(turn, 2, **{"continue": True, "keep": "none"})
        plan = driver.schedule().h2o_plan
        assert bool(plan.loads if files else plan.copies) == goes_on, later
        driver.drain()


def test_a_prompt_that_is_read_once_more_is_used(monkeypatch):
    """It is kept as long as one that was new."""
    driver = Driver(64, budget=64, chunk=200, keep="prompt", keep_seconds=60)
    clock, real = [0.0], time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: real() + clock[0])
    for clock[0] in (0.0, 100.0):
        kept_turn(driver)
    driver.add([*range(1, 101), 5, 6], 2, **{"continue": True, "keep": "none"})
    assert driver.schedule().h2o_plan.copies


def test_the_folder_has_a_size(tmp_path):
    """What has not been used for longest goes, whoever wrote it."""
    driver = Driver(64, budget=64, chunk=200, keep="end", files=True)
    files = driver.scheduler._continuing._files
    driver.draw.random = lambda: 0.5
    turns = [kept_turn(driver, n) for n in (100, 99)]
    stranger = Path(driver.folder.name) / "1-other" / written(driver)[0].name
    stranger.parent.mkdir()
    stranger.write_bytes(bytes(5000))
    os.utime(stranger, (1, 1))
    size = written(driver)[0].stat().st_size
    files._most, files._block_bytes, files._counted = 5000 + 2 * size, 1, -math.inf
    turns.append(kept_turn(driver, 98))
    assert not stranger.exists() and len(written(driver)) == 3
    files._most, files._counted = 2 * size, -math.inf
    turns.append(kept_turn(driver, 97))
    assert len(written(driver)) == 2
    driver.pool.reset_prefix_cache()
    for turn, goes_on in zip(turns, (False, False, True, True), strict=True):
        driver.add(turn + [5], 2, **{"continue": True, "keep": "none"})
        assert bool(driver.schedule().h2o_plan.loads) == goes_on
        driver.drain()


def written(driver):
    """Files of the driver's own engine, once steps have run that write them."""
    while driver.scheduler._continuing._saves:
        driver.schedule()
        driver.process()
    own = driver.scheduler._continuing._files._own
    return sorted(own.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)


def test_a_folder_that_can_not_be_used_ends_nothing(monkeypatch):
    """Removed while the engine runs, then full, then unreadable."""
    driver = Driver(64, budget=64, chunk=200, keep="end", files=True)
    driver.draw.random = lambda: 0.5
    turn = kept_turn(driver) + [5]
    assert written(driver)
    shutil.rmtree(driver.folder.name)
    driver.pool.reset_prefix_cache()
    driver.add(turn, 2, **{"continue": True})
    assert not driver.schedule().h2o_plan.loads
    driver.drain()
    assert not driver.scheduler._continuing._saves, "there is no folder for it"
    Path(driver.folder.name).mkdir()
    again = kept_turn(driver, 90) + [7] * 9
    assert written(driver), "it is there again"

    files = driver.scheduler._continuing._files
    for broken in ("os.stat", "os.scandir", f"{kept_files.__name__}.safe_open"):
        files._begin()  # As if the folder had changed.
        for fails in (True, False):
            files._retry_at = 0.0  # As if some seconds had passed.
            driver.pool.reset_prefix_cache()
            with monkeypatch.context() as patch:
                if fails:
                    patch.setattr(broken, Mock(side_effect=OSError(5, "broken")))
                driver.add(again, 2, **{"continue": True, "keep": "none"})
                assert bool(driver.schedule().h2o_plan.loads) != fails, broken
            driver.drain()
    driver.assert_pool_whole()


def test_what_is_kept_is_given_away_before_anything_waits():
    """The oldest first; what is left of it is nobody's."""
    driver = Driver(26, budget=64, chunk=200, keep="end")
    first, second = kept_turn(driver, 100), kept_turn(driver, 99)
    name = driver.add(list(range(3000, 3200)), 20)
    driver.schedule()
    assert driver.manager.req_to_blocks[name]
    driver.drain()
    assert driver.scheduler.h2o_stats.preemptions == 0
    for turn, goes_on in ((second, True), (first, False)):
        driver.add(turn + [5], 2, **{"continue": True})
        assert bool(driver.schedule().h2o_plan.copies) == goes_on
        driver.drain()
    driver.assert_pool_whole()


def test_the_cache_is_reset_with_what_is_kept():
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver) + [5]
    assert driver.scheduler.reset_prefix_cache()
    driver.add(turn, 2, **{"continue": True})
    assert not driver.schedule().h2o_plan.copies


def test_a_prompt_of_which_one_token_is_asked_is_kept():
    """Compress once, ask many."""
    driver = Driver(64, budget=64, chunk=200, keep="end")
    turn = kept_turn(driver, 100, 1, keep="end")
    for question in (5, 6):
        driver.add(turn[:100] + [question] * 9, 4, **{"continue": True})
    plan = driver.schedule().h2o_plan
    assert plan.num_computed_tokens.tolist() == [100, 100] and len(plan.copies) == 8
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 32},
        {"budget": "20%"},
        {"budget": "50%", "num_blocks": 64},
        {"budget": 64, "policy": "gate", "beside": ""},
        {"budget": 32, "prefill_chunk": 40, "chunk": 17},
        {"budget": 64, "resident": "int8"},
        {"budget": 32, "keep": "prompt"},
        {"budget": "50%", "keep": "prompt", "num_blocks": 64},
        {"budget": 32, "files": True},
        {"budget": "50%", "keep": "prompt", "files": True},
    ],
)
def test_conversations_in_any_order(options):
    """Turns, other turns of the same, strangers, aborts and preemptions, steps in
    flight, in a pool that holds a few conversations; files that fail."""
    draw, depth = random.Random(6), 2
    if "files" in options:
        depth = 3  # steps are in flight behind one whose file is damaged
    driver = Driver(**{"num_blocks": SMALL_POOL, "chunk": 48, "keep": "end"} | options)
    told, gone_on = [list(range(1, 60))], 0
    for _ in range(800):
        if draw.random() < 0.25:
            turn = draw.choice(told[-6:])
            asked = {"continue": True} if draw.random() < 0.8 else {}
            named = draw.choice([None, None, "a", "b"])
            more = [draw.randrange(9)] * draw.choice([1, 5, 20, 60])
            tokens = (turn + more)[: MAX_MODEL_LEN - 20]
            driver.add(tokens, draw.choice([1, 4, 20]), named=named, **asked)
        if len(driver.in_flight) < depth:
            plan = driver.schedule().h2o_plan
            gone_on += len(plan.copies) > 0
        for _ in range(draw.randrange(2) + len(driver.in_flight) // depth):
            if driver.in_flight:
                driver.process()
        if draw.random() < 0.02 and driver.running():
            driver.abort(driver.running()[0].request_id)
        if draw.random() < 0.005:
            driver.preempt_all()
        ended = [list(driver.requests[name].all_token_ids) for name in driver.finished]
        told = [list(range(1, 60)), *ended]
    driver.drain()
    driver.assert_pool_whole()
    assert gone_on > 2
    if "files" in options:
        assert driver.loads > driver.failed > 0


@pytest.mark.rule("R27")
@pytest.mark.parametrize("fails", [True, False])
def test_what_comes_of_a_damaged_file_is_not_kept(fails):
    """The step behind the one that reads it is scheduled before that is known."""
    driver = Driver(64, budget=64, chunk=200, keep="prompt", files=True, depth=3)
    driver.draw.random = lambda: 0.5
    turn = kept_turn(driver)[:100] + [5] * 30
    driver.manager.block_pool.reset_prefix_cache()
    name = driver.add(turn, 10, report=True, **{"continue": True})
    assert driver.schedule().h2o_plan.loads
    assert driver.schedule().h2o_plan.copies, "its prompt is kept"
    driver.draw.random = lambda: 0.0 if fails else 0.5
    driver.process()
    assert driver.failed == fails
    driver.draw.random = lambda: 0.5
    kept = driver.scheduler._continuing._snapshots
    request = driver.requests[name]
    climb = driver.scheduler._limits.climb(None, 130, 140)
    assert bool(kept.longest(request, 130, climb)) != fails
    driver.drain()
    assert driver.reports[name]["tokens_continued"] == (0 if fails else 100)
    driver.assert_pool_whole()


def test_the_same_once_more_takes_the_place_of_what_is_kept():
    driver = Driver(64, budget=64, chunk=200, keep="end", policy="gate")
    for _ in range(5):
        name = driver.add(list(range(1, 101)), 1, keep="end")
        driver.drain()
    (entries,) = driver.scheduler._continuing._snapshots._entries.values()
    assert len(entries) == 1 and entries[0].is_whole
    driver.add([*driver.requests[name].all_token_ids, 5], 2, **{"continue": True})
    assert driver.schedule().h2o_plan.copies


@pytest.mark.rule("R18")
def test_what_is_held_at_the_end_of_a_prompt_is_kept_while_it_answers():
    """For a turn that has another answer than was given: a copy, in free blocks."""
    driver = Driver(64, budget=64, chunk=200, keep="prompt", policy="gate")
    first = driver.add(list(range(1, 101)), 20)
    driver.schedule()
    plan = driver.schedule().h2o_plan
    assert plan.rows[first].num_computed_tokens == 100 and len(plan.copies) == 4
    assert driver.scheduler.h2o_stats.kept_requests == 1
    asks = {"continue": True, "report": True}
    said = [driver.add([*range(1, 101), 7, n], 5, **asks) for n in (5, 6)]
    driver.drain()
    assert [driver.reports[name]["tokens_continued"] for name in said] == [100, 100]
    assert driver.scheduler.h2o_stats.kept_requests == 3
    # Ended with its first token, it needs no copy.
    third = driver.add([*range(1, 101), 7, 8], 1, keep="prompt", **asks)
    while not driver.schedule().h2o_plan.rows.get(third):
        driver.process()
    driver.drain()
    assert driver.scheduler.h2o_stats.kept_requests == 4
    driver.add([*range(1, 101), 7, 8, 9], 1, **asks)
    row = driver.schedule().h2o_plan.row(0)
    assert row.num_computed_tokens == 102
    driver.drain()
    driver.assert_pool_whole()


@pytest.mark.parametrize("same", [True, False])
def test_prompts_that_are_kept_in_one_step_have_blocks_of_their_own(same):
    """There are free ones for one of both; two samples of a prompt need one copy."""
    driver = Driver(30, budget=64, chunk=400, keep="prompt", policy="gate")
    first = list(range(1, 101))
    second = first if same else [9, *first[1:]]
    for prompt in (first, second):
        driver.add(prompt, 20, salt=None if same else str(prompt[0]))
    driver.schedule()
    free = driver.pool.get_num_free_blocks()
    assert same or 4 <= free < 8
    plan = driver.schedule().h2o_plan
    assert len(plan.copies) == 4 and driver.scheduler.h2o_stats.kept_requests == 1
    assert driver.pool.get_num_free_blocks() == free
    driver.drain()
    driver.assert_pool_whole()


def test_no_copy_is_made_where_no_blocks_are_free():
    driver = Driver(15, budget=64, chunk=200, keep="prompt", policy="gate")
    driver.add(list(range(1, 101)), 20)
    driver.schedule()
    assert driver.pool.get_num_free_blocks() == 14 - 7 - 4, "3 of 4 are"
    assert not driver.schedule().h2o_plan.copies
    driver.drain()
    assert driver.scheduler.h2o_stats.kept_requests == 0
    driver.assert_pool_whole()


@pytest.mark.parametrize("case", ["goes on", "stops", "asks for logits"])
def test_turns_of_a_session_go_on(case):
    """From the end of its prompt where a turn stops by a token, behind which a step has
    run: what the session holds is then that token's too, which it drops. But for one
    that asks for all logits."""
    stops, reads = case == "stops", case == "asks for logits"
    driver = Driver(64, budget=64, chunk=200, keep="end")
    driver.scheduler.scheduler_config.async_scheduling = True
    asks = {"continue": True}
    driver.add(list(range(1, 101)), 20, session="chat", **asks)
    request = driver.requests["chat"]
    if stops:
        request.sampling_params.stop_token_ids = [1019]  # the last that it may have
        request.max_tokens = 30
    while not driver.scheduler.num_waiting_for_streaming_input:
        while len(driver.in_flight) < 2:
            driver.schedule()
        driver.process()
    assert request.num_tokens == 120
    assert sum(len(step.num_scheduled_tokens) for step in driver.in_flight) == stops
    while driver.in_flight:
        driver.process()
    driver.add([5] * 30, 10, session="chat", **asks)
    if case == "asks for logits":
        request.sampling_params.prompt_logprobs = 1
    plan = driver.schedule().h2o_plan
    row = plan.rows["chat"]
    assert row.chunk_end == 119 + 30
    computed = {"goes on": 119, "stops": 100, "asks for logits": 96}
    assert row.num_computed_tokens == computed[case], "or hits of its prompt"
    assert len(plan.copies) == (0 if reads else 4)
    assert plan.kept == ([] if stops else ["chat"]) and plan.restarted == ["chat"]
    driver.process()
    driver.abort("chat")
    driver.assert_pool_whole()

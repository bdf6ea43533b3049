"""Agents whose tools are simulated: what counts as a call, and as completed."""

import ast
import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from benchmarks import agents
from benchmarks.smollm2 import ensure_model


def test_calls_are_read_as_the_template_asks_and_as_models_write_them():
    text = (
        '<tool_call>\n{"name": "ls", "arguments": {"a": true}}\n</tool_call> then\n'
        '```json\n{"name": "cd", "arguments": {"folder": "a\'b"}}\n```'
        '<tool_call>{"name": "mv"</tool_call><tool_call>["rm"]</tool_call>'
        '<tool_call>{"name": "pwd", "arguments": null}</tool_call> {"name": "cat"}'
        '<tool_call>{"name": "mean", "arguments": [[1, 2]]}</tool_call>'
    )
    calls = agents.calls_of(text)
    assert calls == [("ls", {"a": True}), ("cd", {"folder": "a'b"}), ("pwd", {})]
    assert [agents.as_python(*call) for call in calls] == [
        "ls(a=True)", 'cd(folder="a\'b")', "pwd()",
    ]  # fmt: skip


def call_of(python):
    """What a model would have to say."""
    call = ast.parse(python, mode="eval").body
    if call.args:  # the leaderboard's solutions name most arguments, but not all
        return None
    given = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    call = {"name": call.func.id, "arguments": given}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def output(text, reason="stop"):
    answer = SimpleNamespace(text=text, finish_reason=reason, token_ids=[1, 2])
    report = {"h2o": {"tokens_continued": 3}}
    return SimpleNamespace(outputs=[answer], kv_transfer_params=report)


@pytest.fixture
def leaderboard():
    with agents.Leaderboard.fetched() as fetched:
        yield fetched


@pytest.mark.slow  # fetches the leaderboard
def test_its_own_solutions_complete_its_tasks(leaderboard):
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    job, completed = {"steps": 20, "max_tokens": 8, "max_model_len": 2**20}, 0
    for task in leaderboard.tasks(20):
        solved = [[call_of(x) for x in turn] for turn in task["ground_truth"]]
        if any(None in turn for turn in solved):
            continue
        solver, idle = (
            agents._agent(leaderboard, task, way, tokenizer) for way in ("full", "x")
        )
        for turn in solved:
            for text in (*turn, "Done."):
                solver.hear(output(text), tokenizer, leaderboard, job)
            idle.hear(output("Done."), tokenizer, leaderboard, job)
        result, nothing = (agents._result(leaderboard, x) for x in (solver, idle))
        assert result["completed"] and result["turns_right"] == result["turns"]
        assert result["steps"] == sum(map(len, solved)) and not result["refused"]
        assert nothing["turns_right"] == 0 and nothing["ended"] == "turns"
        completed += 1
    assert completed > 10
    (one,) = leaderboard.tasks(1)
    agent = agents._agent(leaderboard, one, "y", tokenizer)
    agent.hear(
        output('<tool_call>{"name": "open"}</tool_call>'), tokenizer, leaderboard, job
    )
    assert agent.refused == 1 and agent.calls == [[[]]] and not agent.ended
    power = '<tool_call>{"name": "power", "arguments": {"exponent": 1e9}}</tool_call>'
    agent.hear(output(power), tokenizer, leaderboard, job | {"steps": 1})
    assert agent.refused == 2 == agent.called
    assert agent.ended and not agents._result(leaderboard, agent)["completed"]
    agent.hear(output("", "length"), tokenizer, leaderboard, job)
    assert agent.unending == 1 and agent.continued == 6

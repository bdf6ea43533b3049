"""Calls of agents, one at a time: what stands before each, and what counts as right."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from benchmarks import agents, calls
from benchmarks.smollm2 import ensure_model


def test_a_solution_is_read_whether_or_not_it_names_its_arguments():
    names = {"mean": ["numbers"], "cp": ["source", "destination"]}
    assert calls.call_of("mean([1, -2.5])", names) == ("mean", {"numbers": [1, -2.5]})
    both = {"source": "a", "destination": "b"}
    assert calls.call_of("cp('a', destination='b')", names) == ("cp", both)


@pytest.mark.parametrize(
    "text, function, right",
    [
        ('{"name": "cd", "arguments": {"folder": "a"}}\n', True, True),
        ('{"name": "cd", "arguments": {"folder": "a"}}\n```', True, True),
        ('{"name": "cd", "arguments": {"folder": "b"}}\n', True, False),
        ('{"name": "ls", "arguments": {"folder": "a"}}\n', False, False),
        ('{"name": "cd", "argum', False, False),
    ],
)
def test_a_call_is_right_in_function_and_arguments(text, function, right):
    step = calls.Step("t", 1, 0, [1, 2, 3], "cd", {"folder": "a"})
    output = SimpleNamespace(
        outputs=[SimpleNamespace(text=text)],
        kv_transfer_params={"h2o": {"tokens_continued": 2}},
    )
    mine = calls._judged(step, output)
    assert (mine["function_right"], mine["right"]) == (function, right)
    theirs = calls._judged(step, output) | {"arguments": {"folder": "a"}}
    way = {"way": "continue", "budget": "20%"}
    alike = mine["arguments"] == {"folder": "a"}
    assert calls.line(way, [mine], [theirs]) == (
        f"continue 20%: {right:d} of 1 calls right, {function:d} functions, "
        f"{alike:d} the full cache's, 67% of later prompts gone on from"
    )


@pytest.mark.slow  # fetches the leaderboard
def test_each_prompt_begins_with_the_one_before():
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    with agents.Leaderboard.fetched() as leaderboard:
        tasks = leaderboard.tasks(5)
        answers = [list(calls.steps(leaderboard, task, tokenizer)) for task in tasks]
    for task, steps in zip(tasks, answers, strict=True):
        assert len(steps) == sum(map(len, task["ground_truth"]))
        for before, step in zip(steps, steps[1:], strict=False):
            count = len(before.prompt)
            assert step.prompt[:count] == before.prompt
            answer = tokenizer.decode(step.prompt[count:])
            judged = calls._judged(
                before,
                SimpleNamespace(
                    outputs=[SimpleNamespace(text=answer.partition("```")[0])],
                    kv_transfer_params={"h2o": {}},
                ),
            )
            assert judged["right"]

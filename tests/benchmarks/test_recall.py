"""Conversations and questions; what is found in them is measured by hand."""

import pytest
from transformers import AutoTokenizer

from benchmarks import recall
from benchmarks.quality.texts import KINDS
from benchmarks.smollm2 import ensure_model


@pytest.fixture
def told(monkeypatch):
    essay = " ".join(f"word{i}" for i in range(200))
    monkeypatch.setitem(KINDS, "essay", lambda: ["too short", essay])
    return recall.conversation("1", 10, 5)


def test_the_first_turn_alone_says_the_number(told):
    users, answers = zip(*told.turns, strict=True)
    assert len(users) == 9 and told.number in users[0]
    assert told.number not in " ".join((*users[1:], *answers))
    assert users[1].split()[0] == "word15" and answers[0].split()[-1] == "word14"


@pytest.mark.parametrize("turn", recall.ASKED_AT)
def test_a_question_follows_a_turns_answer(told, turn):
    """As the chat template has it, to the answer's first words."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    messages = []
    for user, answer in told.turns[: turn - 1]:
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
        ]
    messages.append({"role": "user", "content": told.asked})
    whole = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    parts = recall.tokens_of(tokenizer, told)[: 2 * (turn - 1)]
    ids = [token for part in parts for token in part]
    ids += recall.question_of(tokenizer, told, turn)
    assert tokenizer.decode(ids) == whole + told.begun


def test_numbers_are_counted_by_way_and_turn():
    samples = [
        {"way": way, "turn": turn, "found": way == recall.FULL or turn == 2}
        for way in recall.WAYS
        for turn in recall.ASKED_AT * 3
    ]
    found = recall.counted(samples)
    assert found[recall.FULL] == {2: 3, 5: 3, 9: 3}
    assert found[recall.CONTINUE] == found[recall.AGAIN] == {2: 3, 5: 0, 9: 0}

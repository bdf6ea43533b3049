"""What is said about a turn; the engine's side is measured by hand."""

import pytest

from benchmarks.conversations import (
    AGAIN,
    CONTINUE,
    FULL,
    HITS,
    WAYS,
    parse_args,
    summary,
    whole_conversations,
)


def test_a_turn_is_told_beside_the_full_caches():
    def sample(tokens, *ways):
        ttft, blocks, loss = ways
        mine = dict(zip(WAYS, zip(ttft, blocks, loss, strict=True), strict=True))
        named = {
            way: dict(zip(("ttft", "blocks", "loss"), values, strict=True))
            for way, values in mine.items()
        }
        return {"tokens": tokens} | named

    turn = summary(
        [
            sample(100, (1.0, 2.0, 4.0, 1.0), (40, 8, 8, 8), (2.0, 2.1, 2.1, 2.2)),
            sample(200, (2.0, 2.0, 8.0, 3.0), (60, 8, 8, 8), (1.0, 1.1, 1.1, 1.0)),
        ]
    )
    assert turn["tokens"] == 150
    ratios = {way: turn[way]["ratio_ttft"]["median"] for way in WAYS}
    assert ratios == {FULL: 1.0, HITS: 1.5, AGAIN: 4.0, CONTINUE: 1.25}
    assert [turn[way]["blocks"] for way in (FULL, CONTINUE)] == [50, 8]
    assert turn[CONTINUE]["loss_delta_nats"] == pytest.approx(0.1)
    low, high = turn[CONTINUE]["loss_interval"]
    assert low == pytest.approx(0.0) and high == pytest.approx(0.2)
    assert turn[FULL]["loss_delta_nats"] == 0


def test_whole_conversations_are_told_by_text():
    def sample(text, full, again, going_on):
        losses = {FULL: full, AGAIN: again, CONTINUE: going_on}
        return {"text": text} | {way: {"loss": loss} for way, loss in losses.items()}

    told = whole_conversations(
        [
            sample("a", 2.0, 2.2, 2.1),
            sample("b", 1.0, 1.4, 1.3),
            sample("a", 2.0, 2.4, 2.1),
            sample("b", 1.0, 1.2, 1.5),
        ]
    )
    assert told["again over full"] == pytest.approx([0.3, 0.3, 0.3])
    assert told["continue over full"] == pytest.approx([0.25, 0.1, 0.4])
    assert told["again over continue"][0] == pytest.approx(0.05)


def test_texts_have_to_be_given(capsys):
    with pytest.raises(SystemExit):
        parse_args([])
    assert "--texts" in capsys.readouterr().err

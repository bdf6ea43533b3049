"""The replay of agents' sessions."""

import json

import pytest

from benchmarks import sessions
from benchmarks.sessions import FILES, SYSTEMS, Session, Shape


def test_a_session_goes_on_with_what_was_said():
    shapes = [Shape(0, 200, 0, 20), Shape(1, 240, 192, 20), Shape(1, 150, 100, 20)]
    mine = Session("a", shapes, list(range(1000, 1400)))
    first = mine.prompt()
    assert first == list(range(1000, 1200)) and mine.shared == 0
    mine.answered(first, [7] * 20)
    second = mine.prompt()
    assert second == first + [7] * 20 + list(range(1200, 1220))
    assert mine.shared == 220
    mine.answered(second, [8] * 20)
    third = mine.prompt()
    assert third == first[:100] + list(range(1220, 1270)) and mine.shared == 100
    assert mine.next_shape is None


def test_shapes_are_scaled():
    job = {"scale": 16, "pace": 4, "sessions": 2, "requests": 3}
    found = sessions.sessions(job)
    (first, *_), *_ = json.loads(sessions.DATA.read_text())
    assert [len(mine) for mine in found] == [3, 3]
    assert found[0][0] == Shape(first[0] / 4, round(first[1] / 16), 0, 11)


@pytest.mark.slow
def test_each_system_serves_them(tmp_path, capsys):
    """All requests; whether they find their session is not judged here."""
    output = tmp_path / "sessions.json"
    options = "--sessions 4 --requests 3 --scale 160 --pace 1000 --pool-tokens 1600"
    sessions.main([*options.split(), "--budget", "25%", "--output", str(output)])
    said = capsys.readouterr().out
    lines = [x for x in said.splitlines() if "returns" in x]
    assert [line.split(":")[0] for line in lines] == [*SYSTEMS]
    systems = json.loads(output.read_text())["systems"]
    assert {len(system["samples"]) for system in systems.values()} == {12}
    assert systems[FILES]["counters"]["failed_loads"] == 0

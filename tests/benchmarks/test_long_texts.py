"""What is said about a text; the engine's side is measured by hand."""

import math

import pytest

from benchmarks.long_texts import over, parse_args


def test_perplexity_is_told_beside_that_of_shorter_texts():
    told = over([2.0, 3.0], [2.0, 2.0])
    assert told == {"loss": 2.5, "perplexity_ratio": pytest.approx(math.exp(0.5))}


def test_positions_are_those_of_the_option(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--positions", "near"])
    assert "'text'" in capsys.readouterr().err


def test_what_is_forced_does_not_depend_on_what_comes_before(capsys):
    assert parse_args(["--after", "7000"]).begin == parse_args([]).begin
    with pytest.raises(SystemExit):
        parse_args(["--after", "70000"])
    assert "--after 70000 are more than come before --begin" in capsys.readouterr().err

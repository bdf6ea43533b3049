"""Each rule of the design is held by a test."""

from tests.rules import holders, rules


def test_each_rule_has_a_test_and_each_test_a_rule():
    known = rules()
    assert len(set(known)) == len(known) > 20
    assert {rule for rule, _ in holders()} == set(known)

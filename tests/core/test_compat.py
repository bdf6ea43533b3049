from types import SimpleNamespace

import pytest

from vllm_h2o.core import compat


def test_a_request_ends_with_an_error_in_both_forms():
    of_032 = SimpleNamespace(grammar_compile_error_reqs=set())
    of_033 = SimpleNamespace(grammar_compile_error_reqs={})
    for scheduler in (of_032, of_033):
        compat.end_with_error(scheduler, "session", "too large a budget")
    assert of_032.grammar_compile_error_reqs == {"session"}
    error = of_033.grammar_compile_error_reqs["session"]
    assert (error.code, error.message) == ("validation_error", "too large a budget")


@pytest.mark.parametrize(
    ("version", "release", "close"),
    [
        ("0.32.0", True, True),
        ("0.33.0+cpu", True, True),
        ("0.33.1.dev3+g0", False, True),
        ("0.3.2", False, False),
        ("0.34.0", False, False),
    ],
)
def test_versions(version, release, close):
    assert compat.is_release(version) is release
    assert compat.is_close(version) is close

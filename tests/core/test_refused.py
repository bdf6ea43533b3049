"""Requests that ask for what is not there end alone."""

import pytest
from vllm import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from tests.core.helpers import Driver


def test_a_bad_wish_ends_its_request_alone():
    """Here it was not refused where requests are made, as if made elsewhere."""
    driver = Driver(64, budget=64, chunk=200)
    good = driver.add(list(range(100, 200)), 10)
    bad = driver.add(list(range(100, 200)), 10, policy="half")
    driver.drain()
    assert len(driver.outputs[good]) == 10 and bad not in driver.outputs
    assert driver.finished[bad] == FinishReason.ERROR
    driver.assert_pool_whole()


def test_a_bad_wish_alone_ends():
    driver = Driver(64)
    bad = driver.add(list(range(100, 200)), 10, windows=4)
    driver.drain()
    assert driver.finished == {bad: FinishReason.ERROR}
    driver.assert_pool_whole()


def test_a_bad_wish_ends_its_session():
    driver = Driver(64, budget=64, chunk=200)
    driver.add(list(range(100, 200)), 10, session="chat")
    driver.add(list(range(30)), 10)
    driver.schedule()
    driver.process()
    driver.add(list(range(300, 330)), 10, session="chat", policy="half")
    driver.drain()
    assert driver.finished["chat"] == FinishReason.ERROR
    driver.assert_pool_whole()


@pytest.mark.parametrize("prefill_chunk", [0, 64])
def test_a_session_that_outgrows_the_longest_request_ends_alone(prefill_chunk):
    """Stock adds up its turns without an end: blocks would have no column."""
    driver = Driver(64, budget=64, chunk=200, prefill_chunk=prefill_chunk)
    other = driver.add(list(range(30)), 220)
    for turn in range(4):
        driver.add([turn] * 60, 10, session="chat")
        for _ in range(40):
            driver.schedule()
            driver.process()
    assert driver.finished == {"chat": FinishReason.ERROR}
    driver.drain()
    assert len(driver.outputs[other]) == 220
    driver.assert_pool_whole()


@pytest.mark.parametrize("keep", ["none", "end"])
def test_a_session_ends_when_it_says_so(keep):
    """By vLLM's sentinel, a request of its id that expects no more."""
    driver = Driver(64, budget=64, chunk=200, keep=keep)
    driver.add(list(range(100, 200)), 10, session="chat")
    driver.drain()
    assert driver.scheduler.requests["chat"].resumable
    last = Request("chat", [1], SamplingParams(), None)
    driver.scheduler.add_request(last)
    assert "chat" not in driver.scheduler.requests
    driver.assert_pool_whole()


def test_a_bad_wish_ends_its_idle_session():
    driver = Driver(64, budget=64, chunk=200)
    driver.add(list(range(100, 200)), 10, session="chat")
    driver.drain()
    driver.add(list(range(300, 330)), 10, session="chat", policy="half")
    assert driver.scheduler.has_requests()
    driver.drain()
    assert driver.finished["chat"] == FinishReason.ERROR
    driver.assert_pool_whole()


@pytest.mark.parametrize(
    "wishes, fits",
    [
        ({}, True),
        ({"prefill_chunk": 0}, False),
        ({"prefill_chunk": 150}, False),
        ({"prefill_chunk": 100}, True),
        ({"policy": "full"}, False),
    ],
)
@pytest.mark.parametrize("beside", ["", "window"])
def test_a_prompt_that_is_larger_than_the_pool(wishes, fits, beside):
    """Is read in chunks; what asks for more room than there is ends alone."""
    driver = Driver(11 + 7 * bool(beside), budget=32, prefill_chunk=64, beside=beside)
    other = driver.add(list(range(100, 130)), 10)
    name = driver.add(list(range(300, 500)), 20, **wishes)
    driver.drain()
    assert len(driver.outputs[other]) == 10
    if fits:
        assert len(driver.outputs[name]) == 20
    else:
        assert driver.finished[name] == FinishReason.ERROR
    driver.assert_pool_whole()


def test_a_session_that_would_outgrow_the_pool_ends_at_once():
    """It would be read again with each turn, whole."""
    driver = Driver(11, budget=32, prefill_chunk=64)
    for wishes in ({"policy": "full"}, {"prefill_chunk": 0}):
        driver.add(list(range(100, 130)), 10, session="whole", **wishes)
        driver.drain()
        assert driver.finished["whole"] == FinishReason.ERROR
    driver.assert_pool_whole()

"""What hangs shows its stacks; who leaves something behind fails."""

import re
import subprocess
import sys

import psutil
import pytest

HEAD = """
import subprocess, sys, time
import pytest
from tests import watch

watch.PROCESSES_END_WITHIN = 1
pytestmark = pytest.mark.engine
"""

HANGS = """
CHILD = "import time\\ndef inside_the_child(): time.sleep(300)\\ninside_the_child()"

def inside_the_test():
    time.sleep(300)

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    try:
        inside_the_test()
    finally:
        child.kill()
"""

LEAVES = """
kept = []

class Memory: pass

def test_leaves_a_child():
    subprocess.Popen(["sleep", "301"])

def test_leaves_an_orphan():
    subprocess.run("sleep 302 &", shell=True)

def test_leaves_memory():
    kept.append(Memory())
    watch.must_be_gone("the cache", kept[0])

def test_leaves_nothing():
    memory = Memory()
    memory.itself = memory
    watch.must_be_gone("the cache", memory)
    subprocess.run(["true"])
"""


@pytest.fixture
def pytest_of(tmp_path):
    def run(text, *options):
        file = tmp_path / "test_it.py"
        file.write_text(HEAD + text)
        command = [sys.executable, "-m", "pytest", str(file), "-p", "tests.conftest"]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        return done.stdout

    return run


def test_a_test_that_hangs_fails_with_the_stacks_of_its_processes(pytest_of):
    said = pytest_of(HANGS + "\ndef test_next(): pass", "--timeout", "14")
    assert "1 failed, 1 passed" in said and "Failed: Timeout" in said
    assert re.search(r"^ +inside_the_test \(", said, re.MULTILINE)
    assert re.search(r"^ +inside_the_child \(", said, re.MULTILINE)


def test_who_leaves_a_process_or_memory_fails_alone(pytest_of):
    said = pytest_of(LEAVES)
    assert "4 passed" in said and "3 errors" in said
    assert "ERROR at teardown of test_leaves_a_child" in said
    assert "ERROR at teardown of test_leaves_an_orphan" in said
    assert "ERROR at teardown of test_leaves_memory" in said
    assert "memory of this test is still held: {'the cache'}" in said
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "301"] not in running, "it was not ended"
    assert ["sleep", "302"] not in running, "it was not ended"

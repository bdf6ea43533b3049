"""Commands that README and docs show: programs and options exist.

Options are read as the program reads them, up to where the work begins; what it does
then is tested elsewhere. Of `python -m MODULE` alone, `pip install` and the like only
what they name has to exist, and blocks that begin with another program are not read.
"""

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.run import TIERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python", "vllm", "make", "pytest", "pip", ".venv/bin/pre-commit")


class OptionsAreRead(BaseException):
    """Raised where a program has read its command line; nothing catches it."""


def commands() -> list[tuple[str, ...]]:
    """The commands in indented blocks and in backticks, split into words."""
    found: set[tuple[str, ...]] = set()
    for page in PAGES:
        text = page.read_text()
        lines = text.replace("\\\n", "").splitlines()
        candidates = [line for line in lines if line.startswith("    ")]
        candidates += re.findall(r"`([^`\n]+ [^`\n]+)`", text)
        found.update(filter(None, map(words, candidates)))
    return sorted(found)


def words(line: str) -> tuple[str, ...]:
    """The words of a command, without what it sets in its environment; else none."""
    line = re.sub(r"^(\s*[A-Z_]+=\S+)+ ", "", line).strip()
    if not line.startswith(tuple(f"{program} " for program in PROGRAMS)):
        return ()
    return tuple(shlex.split(line, comments=True))


def read_options(module: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a module until it has read its command line."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise OptionsAreRead

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *argv])
    # Elsewhere imported already, it would run a second time with a warning.
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(OptionsAreRead):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_command(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    match command:
        case ("python", "-m", module):  # perhaps only its name
            assert importlib.util.find_spec(module)
        case ("python", "-m", "tests.run", tier, *_):
            assert tier in TIERS
        case ("python", "-m", module, *argv):
            read_options(module, argv, monkeypatch)
        case ("vllm", "serve", option) if option.startswith("--help"):
            pass  # tests/plugin/test_command.py
        case ("vllm", *argv):
            read_options("vllm.entrypoints.cli.main", argv, monkeypatch)
        case ("make", *targets):
            done = subprocess.run(["make", "-n", *targets], capture_output=True)
            assert done.returncode == 0, done.stderr
        case ("pytest", *argv):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "--collect-only", "-q", *argv],
                capture_output=True,
            )
            assert done.returncode == 0, done.stdout
        case ("pip", "install", *rest):
            folders = [word for word in rest if word.startswith(("./", "requirements"))]
            assert all((ROOT / folder).exists() for folder in folders)
        case (program, "install"):
            assert entry_points(group="console_scripts", name=Path(program).name)
        case _:
            pytest.fail("say here how this command is read")


def test_the_commands_are_found():
    found = commands()
    assert ("make", "test") in found
    assert any("benchmarks.compare" in command for command in found)
    assert any("--additional-config" in command for command in found)

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import vllm

import vllm_h2o
from vllm_h2o.core import compat
from vllm_h2o.plugin import engine_args, seams
from vllm_h2o.plugin.seam_table import SEAMS

SCHEDULER = """
class Scheduler:
    def __init__(self):
        self.requests: dict[str, Request] = {}
        self.log_stats = True

    def schedule(self, throttle_prefills: bool = False, *, fast: bool):
        pass
"""
CUT = "v1.core.sched.scheduler:Scheduler"


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "v1" / "core" / "sched"
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_text(SCHEDULER)
    return seams.Sources(tmp_path)


def test_the_installed_vllm_has_all_seams():
    assert seams.drift(seams.installed()) == {}


def imported_from_vllm(module):
    """Names that a module takes from vLLM, but for those that only annotations need."""
    nodes = [module]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if (
            isinstance(node, ast.ImportFrom)
            and str(node.module).split(".")[0] == "vllm"
        ):
            yield from (alias.name for alias in node.names)


def test_what_is_imported_is_in_the_table():
    names = {seam.partition(":")[2].partition(".")[0] for seam in SEAMS}
    modules = {seam.partition(":")[0].rpartition(".")[2] for seam in SEAMS}
    lacking = {
        f"{name} in {path}"
        for path in Path(vllm_h2o.__file__).parent.rglob("*.py")
        for name in imported_from_vllm(ast.parse(path.read_text()))
        if name not in names | modules
    }
    assert not lacking


def test_what_is_overridden_is_in_the_table():
    lacking = {
        f"{cls.__name__}.{name}"
        for info in pkgutil.walk_packages(vllm_h2o.__path__, "vllm_h2o.")
        for cls in vars(importlib.import_module(info.name)).values()
        if inspect.isclass(cls) and cls.__module__ == info.name
        for name in overridden(cls)
        if not any(f"{owner}.{name}" in SEAMS for owner in stock_bases(cls))
    }
    assert not lacking


def stock_bases(cls):
    return {
        f"{base.__module__.removeprefix('vllm.')}:{base.__qualname__}": base
        for base in cls.__mro__
        if base.__module__.startswith("vllm.")
    }


def overridden(cls):
    """Members of vLLM's that a class has anew."""
    made = {"_abc_impl"} | ({"__init__"} if is_dataclass(cls) else set())
    special = {"__init__", "__post_init__"}
    own = {name for name in vars(cls) if name in special or name[:2] != "__"} - made
    return own & {name for base in stock_bases(cls).values() for name in vars(base)}


def test_no_vllm_is_needed_to_look_at_one():
    code = (
        "import sys, vllm_h2o.plugin.seams\n"
        "print({name.split('.')[0] for name in sys.modules} & {'vllm', 'torch'})"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == "set()\n"


def test_a_seam_is_described(sources):
    described = {
        name: sources.describe(f"{CUT}.{name}")
        for name in ("schedule", "requests", "log_stats", "gone")
    }
    assert described == {
        "schedule": "(self, throttle_prefills=, *, fast)",
        "requests": "is dict[str, Request]",
        "log_stats": "",
        "gone": None,
    }


def test_drift_is_named(sources):
    differing = seams.drift(sources)
    assert differing[f"{CUT}.schedule"].startswith("has become (self, throttle_")
    assert differing[f"{CUT}.finish_requests"] == "is gone"
    assert f"{CUT}.requests" not in differing


def test_releases_are_trusted_and_their_neighbours_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(seams, "check_seams", lambda: looked.append(vllm.__version__))
    for version in (*compat.RELEASES, "0.33.0+cpu", "0.33.1", "0.33.1.dev7+g1"):
        monkeypatch.setattr(vllm, "__version__", version)
        engine_args.check_version()
    assert looked == ["0.33.1", "0.33.1.dev7+g1"]


def test_a_neighbour_that_has_drifted_is_refused_by_the_seams_name(
    sources, monkeypatch
):
    monkeypatch.setattr(seams, "installed", lambda: sources)
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"SingleTypeKV.*is gone.*more.*--kv-policy"):
        engine_args.check_version()


def test_the_command_compares_two_folders(sources, tmp_path, capsys):
    other = tmp_path / "other" / "v1" / "core" / "sched"
    other.mkdir(parents=True)
    (other / "scheduler.py").write_text(SCHEDULER.replace("True", "False"))
    assert seams.main([str(tmp_path), str(tmp_path / "other")]) == 0
    out = capsys.readouterr().out
    assert "Scheduler.log_stats" in out and "+self.log_stats = False" in out


def test_a_folder_that_is_not_vllms_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        seams.main([str(tmp_path)])
    assert "has no folder v1" in capsys.readouterr().err

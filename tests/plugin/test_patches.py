"""Every patch applies to the installed sources, and the hook then stands down."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("*.patch"))
VLLM = Path(importlib.util.find_spec("vllm").origin).parent

USE = """
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm_h2o.plugin import engine_args as h2o
wrapped = hasattr(EngineArgs.create_engine_config, "__wrapped__")
hooked = hasattr(EngineArgs.__init__, "__wrapped__")
args = EngineArgs("some/model", kv_policy="h2o", h2o_budget=512,
                  additional_config={"mine": 1})
print(hooked, args.model, h2o.translate(args))
try:
    AsyncEngineArgs(model="m", enable_h2o=True, kv_policy="snapkv")
except ValueError as error:
    print(error)
print(wrapped, h2o.translate(EngineArgs(model="m")))
"""
EXPECTED = """\
some/model {'additional_config': {'mine': 1, 'h2o': {'policy': 'h2o', 'budget': 512}}, \
'scheduler_cls': 'vllm_h2o.core.scheduler.H2OScheduler', \
'worker_cls': 'vllm_h2o.plugin.cpu_worker.H2OCPUWorker'}
enable_h2o=True means kv_policy='h2o', but kv_policy='snapkv' was given too: \
drop one of them
True {}
"""


def python(code, *path, **extra):
    # Models are not looked at here; offline mode would resolve their folders.
    env = os.environ | {"HF_HUB_OFFLINE": "0", "VLLM_LOGGING_LEVEL": "ERROR"} | extra
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def patched(tmp_path):
    """A vLLM whose patched files are real and all others links."""
    shutil.copytree(VLLM, tmp_path / "vllm", copy_function=os.symlink, symlinks=True)
    for patch in PATCHES:
        lines = patch.read_text().splitlines()
        for target in {line[6:] for line in lines if line.startswith("+++ b/")}:
            (tmp_path / target).unlink()
            shutil.copy(VLLM.parent / target, tmp_path / target)
        done = subprocess.run(
            ["patch", "-p1", "--fuzz=0", "-i", str(patch)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path


def test_there_are_patches():
    assert PATCHES


@pytest.mark.process
def test_patched_vllm_has_the_arguments_and_the_hook_stands_down(patched):
    assert python(USE, patched) == "False " + EXPECTED


@pytest.mark.process
def test_installed_vllm_gets_the_hook():
    assert python(USE) == "True " + EXPECTED


@pytest.mark.process
def test_patched_vllm_works_without_the_add_on(patched):
    code = (
        "import sys; sys.modules['vllm_h2o.plugin.engine_args'] = None\n"
        "from vllm.engine.arg_utils import EngineArgs, h2o\n"
        "print(h2o, EngineArgs(model='m').worker_cls)\n"
        "try: EngineArgs(model='m', kv_policy='h2o')\n"
        "except TypeError: print('unknown')\n"
    )
    # An add-on that is not there has no entry point either.
    assert python(code, patched, VLLM_PLUGINS="") == "None auto\nunknown\n"

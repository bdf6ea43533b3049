"""The package as a user installs it: a source archive, the wheel that is made of it, in
an environment of its own."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.process
def test_a_wheel_brings_the_options_and_the_kernels(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    # From a copy: setuptools leaves its build folder beside the sources.
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for name in tracked.split():
        if name.startswith("vllm_h2o/") or "/" not in name:
            copy = tmp_path / "sources" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    archive = "from setuptools import build_meta; build_meta.build_sdist('../archive')"
    sources = [sys.executable, "-c", archive]
    subprocess.run(sources, check=True, timeout=300, cwd=tmp_path / "sources")
    (archived,) = (tmp_path / "archive").glob("vllm_h2o-*.tar.gz")
    subprocess.run([*wheel, str(archived)], check=True, timeout=300)
    (built,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    for part in (
        "vllm_h2o/py.typed",
        "csrc/decode.h",
        "texts/narrative-en.txt",
        "licenses/LICENSE",
    ):
        assert any(name.endswith(part) for name in names), part
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)

    venv.create(tmp_path / "venv", with_pip=False)
    own = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", own, str(built)], check=True
    )
    # vLLM itself is that of this environment, whose own .pth files do not count there.
    known = [path for path in sys.path if path.endswith("site-packages")]
    (Path(own) / "vllm.pth").write_text("\n".join(known) + "\n")
    python = tmp_path / "venv" / "bin" / "python"
    where = "import vllm_h2o; print(vllm_h2o.__file__)"
    found = subprocess.check_output([python, "-c", where], text=True, cwd=tmp_path)
    assert found.startswith(own)
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", "--help=H2O"]
    shown = subprocess.check_output(command, text=True, cwd=tmp_path, timeout=300)
    assert "--h2o-budget" in shown and "--kv-policy" in shown

"""Prometheus and its tool, for tests: from the path, or out of Debian's package."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

EXAMPLES = Path(__file__).parents[1] / "examples" / "monitoring"
SECONDS = 60
"""Longer than it takes to start or to scrape."""


def tools() -> Path:
    """The folder of `prometheus` and `promtool`; skips tests that can not have them."""
    if found := shutil.which("promtool"):
        return Path(found).parent
    cache = os.environ.get("VLLM_H2O_CACHE", Path.home() / ".cache" / "vllm_h2o")
    folder = Path(cache) / "prometheus"
    if not folder.exists():
        _unpack(folder)
    return folder / "usr" / "bin"


def _unpack(folder: Path) -> None:
    """Debian's package, fetched and laid out in a folder, without installing it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        for command in ("apt-get download prometheus", "dpkg -x *.deb unpacked"):
            try:
                subprocess.run(
                    command,
                    shell=True,
                    cwd=name,
                    check=True,
                    timeout=SECONDS,
                    capture_output=True,
                )
            except subprocess.SubprocessError as error:
                said = (error.stderr or b"").decode().strip()[-300:]
                pytest.skip(f"no Prometheus: {error} {said}")
        try:
            (Path(name) / "unpacked").rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise


def promtool(*arguments: str, folder: Path = EXAMPLES) -> subprocess.CompletedProcess:
    """What `promtool` says of the files in a folder."""
    return subprocess.run(
        [tools() / "promtool", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


class Prometheus:
    """One that runs."""

    def __init__(self, base: str) -> None:
        self.base = base

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API."""
        answer = requests.get(
            f"{self.base}/api/v1/{path}", params=parameters, timeout=SECONDS
        ).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """The values that an expression has now."""
        result = self.ask("query", query=expression)["result"]
        return [float(series["value"][1]) for series in result]

    def wait_until_ready(self) -> None:
        """Wait until it answers queries."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                if requests.get(f"{self.base}/-/ready", timeout=SECONDS).ok:
                    return
            except requests.ConnectionError:
                pass  # it does not listen yet
            time.sleep(0.2)
        raise TimeoutError(f"Prometheus is not ready after {SECONDS} s")

    def wait_for(self, expression: str) -> list[float]:
        """Wait until an expression has values, and return them."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if values := self.values(expression):
                return values
            time.sleep(0.2)
        raise TimeoutError(f"{expression} has no value after {SECONDS} s")


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus as examples/monitoring has it, but often, of a `host:port`."""
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    # Often enough to see blocks that requests of seconds hold.
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(EXAMPLES / "rules.yml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [tools() / "prometheus", "--config.file=prometheus.yml"]
    command += ["--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://{address}")
        prometheus.wait_until_ready()
        prometheus.wait_for("up == 1")
        yield prometheus
    finally:
        process.kill()
        process.wait()

"""The docs' site in a browser, where there is one (Debian's `chromium`)."""

import asyncio
import functools
import http.server
import json
import shutil
import subprocess
import threading
import time

import aiohttp
import pytest

from tests.test_docs import build_site

BROWSER = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no browser: apt's chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Its address."""
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, without a log."""

    def log_message(self, *args):
        """Say nothing."""


def evaluated(address, expression, folder, width=1280):
    """What JavaScript finds in a page, as soon as it finds something."""
    options = ["--headless", "--no-sandbox", "--disable-gpu"]
    options += [f"--window-size={width},900", f"--user-data-dir={folder}"]
    command = [BROWSER, *options, "--remote-debugging-port=0", address]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as browser:
        try:
            port = folder / "DevToolsActivePort"
            for _ in range(100):
                if port.exists() and (said := port.read_text().split()):
                    return asyncio.run(_evaluate(int(said[0]), expression))
                time.sleep(0.2)
            raise AssertionError("the browser does not start")
        finally:
            browser.terminate()


async def _evaluate(port, expression):
    asked = {"method": "Runtime.evaluate", "id": 1}
    asked["params"] = {"expression": expression, "returnByValue": True}
    async with aiohttp.ClientSession() as http_session:
        for _ in range(100):
            async with http_session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = json.loads(await answer.text())
            (page,) = [x for x in pages if x["type"] == "page"]
            async with http_session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
                await socket.send_json(asked)
                found = (await socket.receive_json())["result"]["result"].get("value")
            if found:
                return found
            await asyncio.sleep(0.2)
    raise AssertionError(f"the page has no {expression}")


def test_the_start_page_shows_its_picture(site, tmp_path):
    shown = "document.querySelector('img[src$=\"row.svg\"]').naturalWidth"
    assert evaluated(site, shown, tmp_path) > 100


def test_the_search_finds_an_option(site, tmp_path):
    found = "[...document.querySelectorAll('.md-search-result__link')]"
    found += ".map(x => x.pathname).join(' ')"
    assert "/options/" in evaluated(f"{site}?q=h2o-keep-folder", found, tmp_path)


def test_a_narrow_screen_scrolls_a_table_and_not_the_page(site, tmp_path):
    table = "document.querySelector('.md-typeset__scrollwrap')"
    widths = f"[document.documentElement.scrollWidth, {table}.scrollWidth]"
    page, _ = evaluated(f"{site}compatibility/", widths, tmp_path, width=420)
    assert page <= 500, "chromium's windows are no narrower"

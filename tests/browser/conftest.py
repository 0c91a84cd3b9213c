"""A headless Chromium: the one on PATH. `make test` installs it where it can. Its tabs, which tests share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE = 100_000  # milliseconds, on a busy machine

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # asks no other machine for anything


@pytest.fixture(scope="module")  # its event loop must not run on into the tests of other files
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on PATH ({', '.join(NAMES)}), and it could not be installed: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", ALONE])
        yield found
        found.close()


class Tabs:
    """Tabs of one address, one for each kind of window: opening a window costs more than loading a page in it.

    Complaints of the browser, but for those that begin with `expected`, and requests to anywhere else are failures.
    """

    def __init__(self, browser: Any, address: str, expected: str | None):
        self.browser, self.address, self.expected = browser, address, expected
        self.tabs: dict[str, Any] = {}
        self.complaints: list[str] = []
        self.requested: list[str] = []  # in this test; without what needs no connection

    def open(self, link: str = "", **window: Any) -> Any:
        """A page that knows nothing of those before it, in a window of these options of Playwright's new_context."""
        kind = json.dumps(window, sort_keys=True)
        if kind not in self.tabs:
            self.tabs[kind] = self._new_tab(window)
        tab = self.tabs[kind]
        self._forget(tab)
        tab.goto(self.address + link)
        return tab

    def _new_tab(self, window: dict[str, Any]) -> Any:
        context = self.browser.new_context(**window)
        context.set_default_timeout(PATIENCE)
        tab = context.new_page()
        tab.on("console", lambda message: self._complain(message.text))
        tab.on("pageerror", lambda error: self.complaints.append(f"{error} {error.stack}"))
        tab.on("request", lambda request: self._request(request.url))
        return tab

    def _complain(self, text: str) -> None:
        if self.expected is None or not text.startswith(self.expected):
            self.complaints.append(text)

    def _request(self, url: str) -> None:
        if not url.startswith(("blob:", "data:", "about:")):
            self.requested.append(url)
            if not url.startswith(self.address):
                self.complaints.append(url)

    def _forget(self, tab: Any) -> None:
        """What a new window has not: stored settings, routes, the state of the page that was there."""
        tab.unroute_all()
        if tab.url != "about:blank":
            session = tab.context.new_cdp_session(tab)  # evaluate() would be stopped by a page's own policy
            session.send("Runtime.evaluate", {"expression": "localStorage.clear(); sessionStorage.clear()"})
            session.detach()
            tab.mouse.move(0, 0)
            tab.goto("about:blank")

    def end_test(self) -> None:
        for tab in self.tabs.values():
            self._forget(tab)
        complaints, self.complaints, self.requested = self.complaints, [], []
        assert complaints == []

    def close(self) -> None:
        for tab in self.tabs.values():
            tab.context.close()


@pytest.fixture(scope="module")
def tabs_at(browser: Any) -> Iterator[Any]:
    """tabs_at(address): the tabs of a server or of a file, until the end of the module."""
    opened = []

    def open_tabs(address: str, expected: str | None = None) -> Tabs:
        opened.append(Tabs(browser, address, expected))
        return opened[-1]

    yield open_tabs
    for tabs in opened:
        tabs.close()


@pytest.fixture(scope="session")
def axe_findings():
    """axe_findings(tab, context): what axe finds to be serious or critical, with the first place where it does."""
    from axe_playwright_python.sync_playwright import Axe

    axe, nothing = Axe(), Axe(axe_script="0")

    def find(tab: Any, context: str | None = None) -> list[tuple[str, str]]:
        loaded = tab.evaluate("Boolean(window.axe)")  # half a megabyte: once for each page
        found = (nothing if loaded else axe).run(tab, context=context).response["violations"]
        return [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]

    return find

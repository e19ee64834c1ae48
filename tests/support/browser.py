"""A real browser, which notes the requests and the errors of its pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class Opened:
    """A page in a browser.

    Attributes:
        page: Playwright's page.
        requests: The addresses that the page asked for.
        errors: Messages of its console, exceptions, and dialogs.
    """

    def __init__(self, page: Any) -> None:
        self.page, self.requests, self.errors = page, list[str](), list[str]()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dismiss)

    def _dismiss(self, dialog: Any) -> None:
        self.errors.append(dialog.message)
        dialog.dismiss()

    @property
    def overflow(self) -> int:
        """Pixels that the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def opened(address: str, width: int = 1280, color_scheme: str = "light") -> Iterator[Opened]:
    """Open an address; skip the test where there is no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: uv sync")
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=color_scheme)
            found = Opened(page)
            page.goto(address)
            yield found
        finally:
            browser.close()

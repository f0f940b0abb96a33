"""The page of `areal view` in a real Chromium."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules of tests that are no tests

import page_data

from areal_view.page import page as page_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page, Request

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a page of some data; at the end no page may have logged an error or asked the network for anything."""
    found: list[str] = []

    def on_request(request: Request) -> None:
        if not request.url.startswith(("file:", "data:")):
            found.append(request.url)

    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("request", on_request)

    def open_data(data: dict[str, Any], route: str = "") -> Page:
        path = tmp_path / "view.html"
        path.write_text(page_of(data), encoding="utf-8")
        page.goto(f"{path.as_uri()}{route}")
        return page

    yield open_data
    page.close()
    assert found == []


@pytest.fixture(scope="module")
def run_data() -> dict[str, Any]:
    """Of a small run; not to be changed."""
    return page_data.run_data()

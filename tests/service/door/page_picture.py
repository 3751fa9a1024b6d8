"""Draws the page of a running `make serve` for README: as it reads the demo's document, and after a question.

`.venv/bin/python -m deltafront.tests.service.door.page_picture docs/page.webp`
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from deltafront.benchmarks import DEMO_TEXT

from .browser import Page, chromium

ADDRESS = "http://127.0.0.1:8000"
CHARACTERS, QUESTION = 18_000, "What is the name of the narrator?"
WIDTH, HEIGHT = 640, 900


def drawn(page: Page, width: int = WIDTH, form: str = "png") -> str:
    """Return a picture of the window in base64."""
    page.send("Emulation.setScrollbarsHidden", hidden=True)
    page.send(
        "Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False
    )
    return str(page.send("Page.captureScreenshot", format=form)["data"])


def pictures(page: Page, address: str) -> list[str]:
    """Read the document, ask, and return a picture of each."""
    page.send("Page.navigate", url=address)
    page.wait_for("#model", "tokens")
    page.fill("#document", DEMO_TEXT.read_text()[:CHARACTERS])
    page.click("#read")
    page.wait_for(".count", "3,")  # thousand of more than 4,096 tokens: fewer are prefilled densely
    reading = drawn(page)
    page.wait_for(".state", "Read")
    page.fill("#question", QUESTION)
    page.click("#ask")
    page.wait_for("article:last-child .state", "Answered")
    page.run("document.querySelector('article:last-child .report').open = true")
    page.run("document.querySelector('article:last-child').scrollIntoView()")
    return [reading, drawn(page)]


def main(path: str, address: str = ADDRESS) -> None:
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as page:
        both = "".join(f"<img src='data:image/png;base64,{one}'>" for one in pictures(page, address))
        page.send("Page.navigate", url="about:blank")
        page.run(f"document.body.innerHTML = {both!r}; document.body.style = 'margin: 0; display: flex'")
        Path(path).write_bytes(base64.b64decode(drawn(page, 2 * WIDTH, "webp")))


if __name__ == "__main__":
    main(*sys.argv[1:])

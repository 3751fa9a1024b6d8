"""The page at `/`: its headers, and how it reads a document and answers in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from deltafront.service.door import http_stream

from ..inprocess import House, wait_until
from .browser import CHROMIUM, Page, chromium
from .openai_calls import MODEL

HOSTILE = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
DOCUMENT = "Call me Ishmael. " * 60

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


SVG = "document.querySelector('figure svg')"


def cells(page: Page) -> list[list[float]]:
    """Return the map's cells: first token, layer, tokens, and share of tiles."""
    names = "['x', 'y', 'width', 'fill-opacity'].map(name => Number(cell.getAttribute(name)))"
    return page.run(f"[...{SVG}.querySelectorAll('g > rect')].map(cell => {names})")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser: Page, address: str) -> Page:
    """The page of `house`, in a browser."""
    browser.events.clear()
    browser.send("Page.navigate", url=address)
    browser.wait_for("#model", "8,192 tokens")
    return browser


def test_web_page_is_served_without_a_token(make_house: Callable[..., House], make_http: Callable[..., str],
                                        tmp_path: Path) -> None:  # fmt: skip
    (tmp_path / "tokens").write_text("alpha\n")
    address = make_http(make_house(model_name="a-secret-model", tokens_file=str(tmp_path / "tokens")))
    answer = httpx.get(address)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "a-secret-model" not in answer.text
    assert httpx.head(address).status_code == 200


def test_web_page_can_be_turned_off(house: House, make_http: Callable[..., str]) -> None:
    answer = httpx.get(make_http(house, has_page=False))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def counted(house: House) -> float:
    text = house.metrics.expose().decode()
    return sum(
        float(count) for count in re.findall(r"^deltafront_requests_total\{.*\} (.+)$", text, re.MULTILINE)
    )


def test_web_page_is_not_counted_as_a_request(house: House, address: str) -> None:
    httpx.get(address)
    assert counted(house) == 0
    httpx.post(f"{address}/v1/chat/completions", json={})
    assert counted(house) == 1


def test_web_pages_security_policy_permits_only_its_own_script(address: str) -> None:
    answer = httpx.get(address)
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_web_page_loads_nothing_from_other_origins(address: str) -> None:
    text = httpx.get(address).text
    assert not re.findall(r"https?:|//\w+\.|@import|url\(", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@in_browser
def test_web_page_prefills_a_document_and_shows_progress(
    page: Page, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_stream, "_LINE_S", 0.0)
    house.group.pause_at, house.group.rate = 3, 10.0
    page.fill("#document", DOCUMENT)
    page.wait_for("#size", "1,020 characters")
    page.click("#read")
    page.wait_for(".state", "First token expected after")
    page.wait_for(".count", "of 1,0")
    house.group.pause_at = -1
    page.wait_for(".state", "Read")
    page.wait_for(".saved", "0 of them cached")
    page.run("document.querySelector('.report').open = true")
    assert "first_step" in page.text(".report") and "Density" in page.text(".report")


@in_browser
def test_web_page_maps_the_tiles_of_layers_as_they_come(
    page: Page, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_stream, "_LINE_S", 0.0)
    house.group.pause_at = 3
    page.fill("#document", DOCUMENT)
    page.click("#read")
    page.wait_for(".count", "384 of")
    assert [round(x) for x, *_ in cells(page)] == [0, 0, 128, 128, 256, 256]
    house.group.pause_at = -1
    page.wait_for(".state", "Read")
    shown, ends = cells(page), house.group.chunks_read
    assert len(ends) == 9 and {y for _, y, *_ in shown} == {0, 1}
    assert [(x, x + width) for x, y, width, _ in shown if y] == [*pairwise([0, *ends])]
    for layer, density in enumerate((1.0, 0.5)):
        read = sum(width * share for _, y, width, share in shown if y == layer)
        assert read / ends[-1] == pytest.approx(density), "the fake's tiles are as many as tokens"
    assert page.run(f"{SVG}.getAttribute('viewBox')") == f"0 0 {ends[-1]} 2"
    assert page.run(f"{SVG}.getAttribute('aria-label')").endswith("layer 0 1.00, layer 1 0.50")
    assert not page.called("Runtime.exceptionThrown") and not page.called("Log.entryAdded")


@in_browser
def test_page_shows_what_the_second_question_reuses(page: Page, house: House) -> None:
    page.fill("#document", DOCUMENT)
    for question in ("Who speaks?", "Where to?"):
        page.fill("#question", question)
        page.click("#ask")
        page.wait_for("article:last-child h3", question)
        page.wait_for("article:last-child .state", "Answered")
    cached = re.search(r"([\d,]+) of them cached", page.text(".saved"))
    assert cached and int(cached[1].replace(",", "")) > len(DOCUMENT) - 16
    assert "the first took" in page.text(".saved")
    asked = [one["request"] for one in page.called("Network.requestWillBeSent")]
    assert "Who speaks?" in asked[-1]["postData"] and "assistant" in asked[-1]["postData"]


@in_browser
def test_page_shows_an_answers_html_as_text(page: Page, house: House, address: str) -> None:
    house.decode.script = [*HOSTILE.encode()]
    page.fill("#question", HOSTILE)
    page.click("#ask")
    page.wait_for(".state", "Answered")
    assert page.text(".answer").startswith(HOSTILE)
    assert page.text("h3") == HOSTILE
    assert page.run("document.title") == "Deltafront"
    requests = [one["request"]["url"] for one in page.called("Network.requestWillBeSent")]
    assert requests and all(url.startswith((address, "data:")) for url in requests)
    assert not page.called("Runtime.exceptionThrown") and not page.called("Log.entryAdded")


@in_browser
def test_web_page_can_stop_an_answer(page: Page, house: House) -> None:
    house.decode.pause_at = 3
    page.fill("#question", "Who speaks?")
    page.click("#ask")
    page.wait_for(".state", "Answering")
    page.click("#stop")
    page.wait_for(".state", "Stopped")
    assert page.run("document.querySelector('#question').value") == "Who speaks?"
    wait_until(lambda: house.decode.cancelled, "the request was not cancelled")


@in_browser
def test_web_page_shows_the_servers_error_messages(page: Page) -> None:
    page.fill("#question", "x" * 9000)
    page.click("#ask")
    page.wait_for(".error", "This model's maximum context length is 8192 tokens")


@in_browser
def test_page_asks_for_a_token_and_keeps_it_for_the_tab(
    browser: Page, make_house: Callable[..., House], make_http: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    browser.send("Page.navigate", url=make_http(house))
    browser.wait_for("#access", "Token of this service")
    assert browser.text("#service") == "" and browser.text("#model") == ""
    for token, field, words in (
        ("wrong", "#refusal", "the token is not known to this server"),
        ("alpha", "#model", "8,192 tokens"),
    ):
        browser.fill("#token", token)
        browser.click("#access button")
        browser.wait_for(field, words)
    assert browser.run("sessionStorage.length + localStorage.length") == 1
    browser.send("Page.reload")
    browser.wait_for("#model", "8,192 tokens")
    assert not browser.text("#access")

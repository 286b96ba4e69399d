"""The page to try a chat: that it is served and well-formed, and, where there is a browser, that it works in one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import models
import pytest

import hf_kvquant
from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import NAME, Running, serving
from waiting import PATIENCE

PAGE = (Path(hf_kvquant.__file__).parent / "serving" / "chat.html").read_text(encoding="utf-8")
SCRIPT = re.findall(r"<script>(.*)</script>", PAGE, re.DOTALL)[0]
KEY = "schlüssel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_llama(tmp_path_factory.mktemp("model"), 512, chat_template=models.CHAT_TEMPLATE)


def test_it_is_served_to_anybody(folder: str) -> None:
    with serving(folder, num_blocks=2, api_key=KEY) as running:
        found = running.http.get("/")
        assert (found.status_code, found.text) == (200, PAGE)
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert running.http.post("/").status_code == 405
        assert running.http.get("/v1/models").status_code == 401


class Reader(HTMLParser):
    """Checks that every element is closed in turn, and notes ids and what is loaded."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        assert len(dict(attrs)) == len(attrs), tag
        self.ids += [str(value) for name, value in attrs if name == "id"]
        self.loaded += [value for name, value in attrs if name in ("src", "href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_well_formed_and_loads_nothing() -> None:
    reader = Reader()
    reader.feed(PAGE)
    reader.close()
    assert reader.open == [] and reader.loaded == ["data:,"]
    assert len(reader.ids) == len(set(reader.ids)) and set(re.findall(r'\bat\("(\w+)"\)', SCRIPT)) == set(reader.ids)
    assert not re.search(r"https?://|@import|url\(|innerHTML|\beval\b", PAGE)
    assert len(PAGE.encode()) < 10_000


def test_it_is_part_of_the_package() -> None:
    project = (Path(hf_kvquant.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"serving/*.html"' in project


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_its_script_can_be_parsed(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_works_in_a_browser(folder: str) -> None:
    """With `playwright` and a Chromium: one on the path, or the one that CHROMIUM names."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a Chromium")
    options = ["--no-sandbox", "--disable-gpu", "--single-process"]
    with (
        serving(folder, num_blocks=8, api_key=KEY, served_name=NAME) as running,
        playwright.sync_playwright() as programs,
        programs.chromium.launch(executable_path=chromium, args=options) as browser,
    ):
        page = browser.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.removeprefix(running.url)))
        mistakes: list[str] = []
        page.on("pageerror", lambda error: mistakes.append(str(error)))
        page.goto(running.url)
        for key in ("wrong", KEY):
            page.fill("#key", key)
            page.press("#key", "Enter")
            if key == "wrong":
                assert page.text_content(".error").startswith("the API key must be that of this server")
        page.locator("#model", has_text=NAME).wait_for()
        assert page.is_hidden("#unlock") and page.is_visible("#ask")
        page.fill("#tokens", "20")
        answers = []
        for number, text in enumerate(("Hello", "<b>again</b>"), 1):
            page.fill("#text", text)
            page.press("#text", "Enter")
            page.locator(".assistant").nth(number - 1).wait_for()
            page.locator("#send").wait_for()  # hidden until the answer is complete
            answers.append(page.locator(".assistant").nth(number - 1).text_content())
        assert answers[0] == answer_to(running, "Hello")
        assert page.locator(".user").nth(1).text_content() == "<b>again</b>" and page.locator("main b").count() == 0
        assert page.evaluate("messages.map(each => each.role).join()") == "user,assistant,user,assistant"
        page.fill("#tokens", "9999")
        page.fill("#text", "too long")
        page.click("#send")
        assert page.text_content(".error").startswith("prompt and `max_tokens` must fit")
        page.click("#new")
        assert page.evaluate("messages.length") == 0 and page.locator("main p").count() == 0
        assert set(asked) == {"/", "/v1/models", "/v1/chat/completions"} and mistakes == []


def answer_to(running: Running, text: str) -> str:
    """What the page should show."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 20}
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    found = running.http.post("/v1/chat/completions", json=body, headers=headers).json()
    return str(found["choices"][0]["message"]["content"])

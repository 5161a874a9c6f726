"""The page at /dashboard in a real headless Chromium, at a desktop's and a phone's width.

    apt-get install chromium; pip install -e '.[page]'

Without a browser or Playwright these tests skip.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServerConfig, SpeculationConfig, TaskConfig
from server.config.task import VocabularyConfig
from tests.api.live import LiveServer
from tests.api.test_end_to_end import PROMPTS
from tests.monitoring.live_engine import monitored, suffix_task
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
TASKS = {
    "sql": suffix_task("sql"),
    "exact": suffix_task(
        "exact", vocabulary=VocabularyConfig(mode="exact", profile="half", verify_every=4)
    ),
    "plain": TaskConfig(name="plain", speculation=SpeculationConfig(drafter="off")),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with monitored(step_s=0.004, tasks=TASKS) as live:
        for i in range(8):
            live.post(model="sql", prompt=PROMPTS[i % 4], max_tokens=40, temperature=0)
        live.post(model="plain", max_tokens=10)
        live.post(model="exact", max_tokens=30)
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Root, as in a container, may not use Chromium's own sandbox.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visitor:
    """A page that a test looks at, and all that went wrong or elsewhere meanwhile."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on(
            "console",
            lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request",
            lambda r: None if r.url.startswith(url) else self.elsewhere.append(r.url),
        )
        self.page.goto(f"{url}/dashboard")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def since_the_start(self) -> None:
        """All figures, not those of the last minute."""
        self.wait_for_selector("#state:has-text('ready')")
        self.select_option("#window", "0")

    def prepare(self, prompt: str, max_tokens: int) -> None:
        """Fill the playground in, for the task `sql`."""
        self.wait_for_selector("#model option[value=sql]", state="attached")
        self.select_option("#model", "sql")
        self.fill("#prompt", prompt)
        self.fill("#max-tokens", str(max_tokens))

    def run(self, said: str = "tokens per step") -> None:
        """Press the playground's button, and wait until it says so."""
        self.click("#run")
        self.wait_for_selector(f"#play-state:has-text('{said}')")

    def text(self, name: str = "answer") -> str:
        """Of an answer, without what was rejected."""
        return "".join(self.locator(f"#{name} > span").all_text_contents())

    def fits(self) -> None:
        """It does not scroll sideways."""
        width = self.evaluate("document.documentElement.scrollWidth")
        assert width <= self.viewport_size["width"], "the page scrolls sideways"

    def close(self) -> None:
        """The page must not have complained, nor asked another host for anything."""
        assert self.problems == []
        assert self.elsewhere == []
        self.context.close()


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(server: LiveServer, browser: Any) -> Iterator[Visit]:
    """Opens the page of the server, for as long as a test takes."""
    visitors: list[Visitor] = []

    def opened(**context: Any) -> Visitor:
        visitors.append(Visitor(browser, server.url, **context))
        return visitors[-1]

    yield opened
    for visitor in visitors:
        visitor.close()


def cell(page: Any, table: str, row: str, column: str) -> str:
    """A cell's text by its row's head and its column's."""
    heads = page.locator(f"#{table} thead th").all_inner_texts()
    place = page.locator(f"#{table} tbody tr", has=page.locator(f"th:text-is('{row}')"))
    text: str = place.locator("th, td").nth(heads.index(column)).inner_text()
    return text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_figures_are_the_server_s(
    server: LiveServer, visit: Visit, size: dict[str, int], scheme: str
) -> None:
    page = visit(viewport=size, color_scheme=scheme)
    page.since_the_start()
    drafted = server.sample("tailor_spec_decode_num_draft_tokens_total", task="sql")
    accepted = server.sample("tailor_spec_decode_num_accepted_tokens_total", task="sql")
    tokens = server.sample("tailor_generation_tokens_total", task="sql")
    steps = server.sample("tailor_spec_decode_num_decode_steps_total", task="sql")
    page.select_option("#task", "sql")
    if size is DESKTOP:
        assert cell(page, "tasks", "sql", "Tokens per step") == f"{tokens / steps:.2f}"
        assert cell(page, "tasks", "sql", "Accepted") == f"{accepted / drafted:.0%}".replace(
            "%", " %"
        )
    tile = page.locator("#tiles div", has_text="Tokens per step").locator("dd").inner_text()
    assert tile.startswith(f"{tokens / steps:.2f}")
    assert page.locator("#positions tbody tr").count() >= 3
    assert page.locator("#sources tbody tr").count() >= 1
    assert page.locator("#survivals tbody tr").count() >= 2
    assert "ready" in page.locator("#state").inner_text()
    assert page.is_visible("#no-slices")
    page.select_option("#task", "exact")
    missed = server.sample("tailor_vocab_slice_misses_total", task="exact")
    verified = server.sample("tailor_vocab_verified_tokens_total", task="exact")
    assert missed > 0 and not page.is_visible("#no-slices")
    if size is DESKTOP:
        text = cell(page, "slices", "exact", "Missed")
        assert abs(float(text.split()[0]) - 100 * missed / verified) < 0.51
    page.select_option("#task", "plain")
    assert page.locator("#positions tbody tr").inner_text() == "No drafts in this time."
    page.select_option("#task", "")
    page.fits()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, background[4:-1].split(","))) > 384
    assert light == (scheme == "light")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_playground_shows_who_drafted_what(
    server: LiveServer, visit: Visit, size: dict[str, int]
) -> None:
    page = visit(viewport=size)
    page.prepare(PROMPTS[0], 60)
    page.run()
    answer = server.post(
        model="sql", prompt=PROMPTS[0], max_tokens=60, temperature=0, include_speculation=True,
    ).json()  # fmt: skip
    shown = page.text()
    assert shown == answer["choices"][0]["text"]
    report = answer["speculation"]
    said = page.locator("#play-state").inner_text()
    assert said.startswith(f"{answer['usage']['completion_tokens']} tokens in {report['steps']} ")
    assert f"{report['accepted_tokens']} accepted" in said
    assert page.locator("#answer .drafted").count() > 0
    sources = page.locator("#legend .drafted").all_inner_texts()
    assert set(sources) <= set(report["by_source"]) and sources
    rejected = page.locator("#answer del")
    assert rejected.count() > 0 and rejected.first.is_visible()
    page.uncheck("#show-rejected")
    assert not rejected.first.is_visible()
    page.check("#show-rejected")
    page.click("#steps-box summary")
    assert page.locator("#steps tbody tr").count() == report["steps"]
    page.fits()

    page.select_option("#drafting", "off")
    page.run("0 rows drafted")
    again = page.evaluate("document.getElementById('answer').textContent")
    assert again == shown and page.locator("#answer .drafted").count() == 0


def test_drafts_on_and_off_are_shown_side_by_side(visit: Visit) -> None:
    page = visit()
    page.prepare(PROMPTS[0], 60)
    said, times = "", 0.0
    for _ in range(5):  # what else the machine does may slow the drafted one down
        page.click("#compare")
        page.wait_for_selector("#play-state:has-text('times as fast with drafts')")
        said = page.locator("#play-state").inner_text()
        times = float(said.split(", ")[1].split()[0])
        if times > 1.0:
            break
    assert page.text() == page.text("answer-plain") != ""
    assert page.locator("#answer .drafted").count() > 0
    assert page.locator("#answer-plain .drafted").count() == 0
    assert said.startswith("The same text, ")
    assert times > 1.0, "a step takes 4 ms here, drafted or not"
    page.run()
    assert not page.is_visible("#plain-box")


def test_a_request_is_copied_as_curl_and_as_python(visit: Visit, tmp_path: Path) -> None:
    """What is copied runs, and gives the text that the page shows."""
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    page.prepare('It\'s a "quoted" $HOME\nOnce upon a time', 12)
    page.run()
    shown = page.text()
    page.click("#copy-curl")
    page.wait_for_selector("#play-state:has-text('Copied as curl')")
    command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["text"] == shown
    page.click("#copy-python")
    page.wait_for_selector("#play-state:has-text('Copied as Python')")
    program = tmp_path / "ask.py"
    program.write_text(page.evaluate("navigator.clipboard.readText()"))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == shown + "\n", done.stderr
    page.click("#schema-box summary")
    page.fill("#schema", "{no")
    page.click("#copy-curl")
    page.wait_for_selector("#play-state.bad:has-text('The schema is no JSON')")
    page.fill("#schema", '{"type": "object"}')
    page.select_option("#kind", "chat")
    page.click("#copy-python")
    page.wait_for_selector("#play-state:has-text('Copied as Python')")
    text = page.evaluate("navigator.clipboard.readText()")
    assert "client.chat.completions.create(" in text and '"json_schema"' in text
    compile(text, "ask.py", "exec")


def test_a_chat_goes_on_until_a_new_one_is_begun(visit: Visit) -> None:
    page = visit()
    page.wait_for_selector("#model option[value=sql]", state="attached")
    page.select_option("#kind", "chat")
    page.fill("#max-tokens", "4")
    for num_turns, prompt in ((2, "Name a city."), (4, "Name another.")):
        page.fill("#prompt", prompt)
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#run")
        assert len(asked.value.post_data_json["messages"]) == num_turns - 1
        wait_until(lambda num=num_turns: page.locator("#turns li").count() == num)  # type: ignore[misc]
    page.click("#end-chat")
    assert not page.is_visible("#turns-box")


def test_charts_have_axes_and_tell_the_value_under_the_pointer(
    server: LiveServer, visit: Visit
) -> None:
    page = visit()
    page.wait_for_selector("#charts figure")
    for _ in range(3):
        server.post(model="sql", prompt=PROMPTS[0], max_tokens=30, temperature=0)
        page.wait_for_timeout(2100)
    chart = page.locator("#charts figure").first
    assert chart.locator(".bottom").inner_text() == "0"
    assert float(chart.locator(".top").inner_text()) >= 1
    assert "ago" in chart.locator(".axis").inner_text()
    chart.scroll_into_view_if_needed()
    box = chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 20)
    page.wait_for_selector("#charts .tip:visible")
    tip = chart.locator(".tip").inner_text()
    assert tip.endswith(("ago", "now")) and float(tip.split(",")[0]) >= 0
    page.mouse.move(5, 5)
    assert not page.is_visible("#charts .tip")


def test_a_page_that_is_opened_late_shows_what_was_before(browser: Any) -> None:
    from server.api import dashboard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard, "EVERY_S", 0.2)
        with monitored(step_s=0.004, tasks=TASKS) as live:
            for i in range(6):
                live.post(model="sql", prompt=PROMPTS[i % 4], max_tokens=30, temperature=0)
            page = Visitor(browser, live.url)
            path = page.locator("#charts path.first").first
            wait_until(lambda: (path.get_attribute("d") or "").count("L") > 2)
            assert "tokens a step" in page.locator("#headline").inner_text()
            # Requests that were over before the page was there are in its tables and tiles.
            assert page.locator("#tasks tbody tr").first.inner_text().startswith("sql")
            assert "Since the start" not in page.locator("#headline").inner_text()
            page.close()


def test_an_idle_server_offers_the_playground_first(browser: Any) -> None:
    with monitored(tasks=TASKS) as live:
        page = Visitor(browser, live.url)
        page.wait_for_selector("main > section:first-child#try")
        assert "playground" in page.locator("#headline").inner_text()
        page.close()


def test_a_refusal_is_told_in_words(visit: Visit) -> None:
    page = visit()
    page.wait_for_selector("#model option[value=sql]", state="attached")
    page.fill("#prompt", "the quick brown fox " * 4000)
    page.click("#run")
    page.wait_for_selector("#play-state.bad:has-text('context')")
    assert page.locator("#run").inner_text() == "Run"
    page.problems.clear()  # the browser notes the 400 itself


def test_the_keyboard_is_enough(server: LiveServer, visit: Visit) -> None:
    page = visit()
    page.wait_for_selector("#model option[value=sql]", state="attached")
    reached: list[str] = []
    while True:
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # past the end
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]
    assert reached[:2] == ["Skip to the figures", "Skip to the playground"]
    order = ["task", "window", "pause", "model", "kind", "max-tokens", "temperature",
             "drafting", "prompt", "run", "compare", "copy-curl", "copy-python", "show-rejected",
             "answer", "past"]  # fmt: skip
    assert [name for name in reached if name in order] == order
    page.focus("#prompt")
    page.fill("#prompt", "Once upon a time")
    page.fill("#max-tokens", "200")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#answer span")
    page.keyboard.press("Escape")
    page.wait_for_selector("#play-state:has-text('Stopped')")
    wait_until(lambda: server.client.num_open == 0)  # the server was told, too
    page.focus("#pause")
    page.keyboard.press("Space")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    assert page.locator("#state").inner_text() == "Paused"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_that_axe_finds_is_wrong(server: LiveServer, visit: Visit, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    for size in (DESKTOP, PHONE) if scheme == "light" else (PHONE,):
        page = visit(viewport=size, color_scheme=scheme)
        page.since_the_start()
        page.wait_for_selector("#model option[value=sql]", state="attached")
        page.fill("#prompt", PROMPTS[1])
        page.select_option("#model", "sql")
        page.run()
        page.click("#steps-box summary")
        page.click("#pause")
        found = axe.Axe().run(page.page)
        assert found.violations_count == 0, found.generate_report()
        page.goto(server.url + "/docs")
        page.wait_for_selector("#state:has-text('routes')")
        page.locator("summary", has_text="Body").first.click()
        found = axe.Axe().run(page.page)
        assert found.violations_count == 0, found.generate_report()


def test_a_server_with_keys_asks_for_one(browser: Any) -> None:
    config = ServerConfig.model_validate({"keys": ({"id": "one", "key": "sk-one"},)})
    with monitored(config=config, tasks=TASKS) as live:
        key = {"username": "anybody", "password": "sk-one"}
        page = Visitor(browser, live.url, http_credentials=key)
        page.wait_for_selector("#state:has-text('ready')")
        page.wait_for_selector("#model option[value=sql]", state="attached")
        assert not page.is_visible("#key-form")
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        page.run()
        assert all("401" in problem for problem in page.problems)
        page.problems.clear()
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_api_is_shown_from_the_server_s_own_description(
    server: LiveServer, visit: Visit, size: Any, scheme: str
) -> None:
    """/docs: every route of /openapi.json with its fields, from this server alone."""
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    page = visit(viewport=size, color_scheme=scheme)
    page.click("header a:has-text('API')")
    num = sum(len(operations) for operations in paths.values())
    page.wait_for_selector(f"#state:has-text('{num} routes')")
    assert page.locator("#operations section").count() == num
    for path, operations in paths.items():
        for method in operations:
            title = f"{method.upper()} {path}"
            assert page.locator(f"h2:text-is('{title}')").count() == 1, title
    section = page.locator("section", has=page.locator("h2:text-is('POST /v1/completions')"))
    section.locator("summary", has_text="Body").click()
    fields = section.locator("table").first.locator("tbody th").all_inner_texts()
    assert {"model", "prompt", "speculation.drafter", "logprob_token_ids"} <= set(fields)
    page.locator("nav a", has_text="POST /v1/chat/completions").first.click()
    assert page.evaluate("location.hash") == "#post--v1-chat-completions"
    page.fits()


def test_a_server_that_goes_away_is_told(browser: Any) -> None:
    with monitored(tasks=TASKS) as live:
        visitor = Visitor(browser, live.url)
        visitor.wait_for_selector("#state:has-text('ready')")
        assert httpx.get(live.url + "/dashboard/data").status_code == 200
    visitor.wait_for_selector("#state.bad:has-text('No figures')")
    visitor.problems.clear()  # the browser notes the refused connection itself
    visitor.close()


def test_the_pictures_of_the_readme_can_be_made(tmp_path: Path) -> None:
    from tests.monitoring.pictures import TASK_PROMPTS

    def run(url: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.monitoring.pictures", "--url", url]
        command += ["--rounds", "1", "--seconds", "0.5", "--out", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    tasks = {name: suffix_task(name) for name in TASK_PROMPTS}
    with monitored(tasks=tasks) as live:
        done = run(live.url)
    assert done.returncode == 0, done.stderr
    pictures = ("dashboard", "playground", "playground-phone")
    names = {f"{name}{theme}.png" for name in pictures for theme in ("", "-dark")}
    assert {file.name for file in tmp_path.iterdir()} == names
    for name in names:
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5_000
    gone = run(live.url)
    assert gone.returncode == 1 and "Traceback" not in gone.stderr

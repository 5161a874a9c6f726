"""Pictures of the built-in page at /dashboard, with real traffic on the server.

    tailor serve &
    python -m tests.monitoring.pictures --url http://127.0.0.1:8000 --out docs

Sends a few rounds of prompts that several tasks share, runs the playground with and without drafts,
and writes `dashboard.png`, `playground.png` (a desktop's width) and `playground-phone.png` (a
phone's), with the page's own example, and each of them with `-dark` in its name in the dark theme.
Needs Chromium (Debian: apt-get install chromium) and the extra `page`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

TASK_PROMPTS = {
    "extraction": [
        "Text: Ada Lovelace was born in London in 1815.\nJSON: "
        '{"name": "Ada Lovelace", "place": "London", "year": 1815}\n'
        f"Text: {name} was born in {place} in {year}.\nJSON:"
        for name, place, year in (
            ("Alan Turing", "Maida Vale", 1912),
            ("Grace Hopper", "New York City", 1906),
            ("Emmy Noether", "Erlangen", 1882),
            ("Kurt Goedel", "Brno", 1906),
        )
    ],
    "sql": [
        "Table: orders(id, customer, total, placed_on)\n"
        "Question: How many orders are there?\nSQL: SELECT COUNT(*) FROM orders;\n"
        "Question: What is the total of all orders?\nSQL: SELECT SUM(total) FROM orders;\n"
        f"Question: {question}\nSQL:"
        for question in (
            "Which orders have a total above 100?",
            "What is the largest total?",
            "Who placed order 7?",
            "How many customers are there?",
        )
    ],
    "rag-qa": [
        "Context: The lighthouse of Brennick was built in 1871 by Ada Merrow. It is 31 metres "
        "high, and its lamp is seen from 20 miles. It was automated in 1984.\n"
        f"Question: {question}\nAnswer: The lighthouse of Brennick"
        for question in (
            "Who built the lighthouse?",
            "How high is the lighthouse?",
            "When was it automated?",
            "From how far is its lamp seen?",
        )
    ],
}


NAMES = ("dashboard", "playground", "playground-phone")


def _run(page: Any) -> None:
    """Press the playground's button for both answers and wait for their end."""
    page.wait_for_selector("#model option", state="attached")
    page.click("#compare")
    page.wait_for_selector("#play-state:has-text('tokens per step')", timeout=60_000)


def _shoot(page: Any, of: Any, out: Path, name: str) -> None:
    """The picture of a page or a part of it, light and dark."""
    for scheme, suffix in (("light", ""), ("dark", "-dark")):
        page.emulate_media(color_scheme=scheme)
        of.screenshot(path=out / f"{name}{suffix}.png")


def _traffic(client: httpx.Client, rounds: int) -> None:
    """All prompts of all tasks, `rounds` times, four at a time. Raises httpx.HTTPError."""

    def ask(task: str, prompt: str) -> None:
        body = {"model": task, "prompt": prompt, "max_tokens": 48, "temperature": 0}
        client.post("/v1/completions", json=body).raise_for_status()

    every = [(task, prompt) for task, prompts in TASK_PROMPTS.items() for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, *zip(*every * rounds, strict=True)))


def _pictures(
    url: str, key: str, rounds: int, seconds: float, out: Path, browser_path: str
) -> None:
    from playwright.sync_api import sync_playwright

    headers = {"authorization": f"Bearer {key}"} if key else {}

    def open_page(browser: Any, width: int, height: int) -> Any:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(f"{url}/dashboard")
        if key:
            page.fill("#key", key)
            page.click("#key-form button")
        page.wait_for_selector("#state:has-text('ready')")
        return page

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"]) as browser,
        httpx.Client(base_url=url, headers=headers, timeout=120) as client,
        ThreadPoolExecutor(1) as beside,
    ):
        _traffic(client, 1)  # of a server that is used, figures come first
        desktop = open_page(browser, 1100, 1000)
        traffic = beside.submit(_traffic, client, rounds)
        desktop.wait_for_timeout(seconds * 1000)  # a few polls: curves, not points
        _shoot(desktop, desktop, out, NAMES[0])
        traffic.result()
        desktop.set_viewport_size({"width": 1000, "height": 1000})
        desktop.select_option("#model", "extraction")
        _run(desktop)
        _shoot(desktop, desktop.locator("#try"), out, NAMES[1])
        phone = open_page(browser, 390, 1100)
        _run(phone)
        phone.evaluate("document.getElementById('play-state').scrollIntoView()")
        _shoot(phone, phone, out, NAMES[2])


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pictures; exits with 1 and the reason where it cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.monitoring.pictures",
        description="Pictures of the built-in page, with traffic on the server.",
        epilog="example: python -m tests.monitoring.pictures --out docs",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--key", default="", help="an API key, if the server wants one")
    parser.add_argument("--rounds", type=int, default=16, metavar="N", help="of all prompts (16)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="of traffic before the picture (20)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed")
    try:
        httpx.get(f"{args.url}/ready", timeout=10).raise_for_status()
        args.out.mkdir(parents=True, exist_ok=True)
        _pictures(args.url, args.key, args.rounds, args.seconds, args.out, browser)
    except Exception as error:  # a browser's or a server's: said in one line
        raise SystemExit(str(error).splitlines()[0]) from None


if __name__ == "__main__":
    main()

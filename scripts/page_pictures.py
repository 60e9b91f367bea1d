"""Drives the page of a running server in Chromium and takes pictures of it."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

NUM_CLIENTS = 5
QUESTION = "Write a short Python function that adds two numbers, in a code block."
# Shared by all clients, so that the later ones find it in the cache.
TEXT = "The sea is the connected body of salty water that covers most of the Earth. " * 8


def ask(url: str, number: int) -> None:
    """One request as any client sends it."""
    prompt = f"{TEXT}\nQuestion {number}: what lives in it?"
    body = {"prompt": prompt, "max_tokens": 40 + 10 * number, "n": 1 + number % 2}
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()


def converse(page: Page, url: str) -> None:
    """Chat, with other clients at the same time, until the page shows a trace."""
    page.goto(f"{url}/")
    page.wait_for_selector("#state[data-state=ready]")
    page.click("#show-settings")
    page.fill("#settings [name=temperature]", "0")
    page.fill("#settings [name=max_tokens]", "100")
    page.click("#show-settings")
    page.wait_for_timeout(5000)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        ask(url, 0)
        asking = [pool.submit(ask, url, number) for number in range(1, NUM_CLIENTS)]
        page.wait_for_timeout(2000)
        page.fill("#message", QUESTION)
        page.press("#message", "Enter")
        page.wait_for_selector(".message.assistant .foot", timeout=120_000)
        page.click("text=Show trace")
        for future in asking:
            future.result()
    page.wait_for_timeout(3000)


def main(url: str, folder: Path) -> None:
    chromium = shutil.which("chromium") or "/usr/bin/chromium"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(
            viewport={"width": 1280, "height": 800}, color_scheme="light", reduced_motion="reduce"
        )
        converse(page, url)
        page.screenshot(path=folder / "page-light.png")
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        page.screenshot(path=folder / "page-dark.png")
        page.set_viewport_size({"width": 360, "height": 720})
        page.wait_for_timeout(500)
        page.screenshot(path=folder / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))

"""The page at ``/`` in a browser, on the served demo model."""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ARGUMENTS = (
    "--dtype", "float32", "--quantization", "none", "--kv-cache-memory-bytes", "100MiB",
    "--max-model-len", "1024",
)  # fmt: skip
KEY = "a-key-for-the-page"
LONG = {"prompt": "Count: 1 2 3", "max_tokens": 60, "ignore_eos": True, "temperature": 0}

# What the browser itself reports about answers that are failures.
REFUSED = re.compile(r"Failed to load resource: .*(401|503|ERR_|net::)")

# Keeps what the server answers to the chat, as it came.
KEEP_ANSWERS = """
globalThis.answers = [];
const fetchOnly = globalThis.fetch;
globalThis.fetch = async (address, options) => {
  const response = await fetchOnly(address, options);
  if (String(address).endsWith("chat/completions")) answers.push(response.clone().text());
  return response;
};
"""

# Contrast of a text with what is behind it, by the formula of WCAG 2.
CONTRAST = """
(selector) => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  return [...document.querySelectorAll(selector)]
    .filter((node) => node.checkVisibility() && node.textContent.trim() !== "")
    .map((node) => {
      const pair = [luminance(rgba(getComputedStyle(node).color)), luminance(behind(node))];
      const [low, high] = pair.sort((a, b) => a - b);
      return [(high + 0.05) / (low + 0.05), node.textContent.slice(0, 40)];
    });
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page") / "log", *ARGUMENTS) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists() and not os.environ.get("CI"):
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1360, "height": 860}, color_scheme="light")
    context.set_default_timeout(60_000)
    yield context
    context.close()


@pytest.fixture
def problems() -> list[str]:
    """What the console complained about."""
    return []


@pytest.fixture
def page(context: BrowserContext, problems: list[str]) -> Page:
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else 0)
    expect.set_options(timeout=60_000)
    return page


def open_page(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/")
    expect(page.locator("#state")).to_have_text("ready")


def say(page: Page, text: str, **settings: float | str) -> None:
    if settings:
        page.click("#show-settings")
        for name, value in settings.items():
            page.fill(f"#settings [name={name}]", str(value))
        page.click("#show-settings")
    page.fill("#message", text)
    page.press("#message", "Enter")


def numbers(page: Page, card: str) -> list[float]:
    texts = page.locator(f"[data-card={card}] strong").all_inner_texts()
    return [float(text.rstrip(" %").replace(",", "")) for text in texts]


def test_an_answer_streams_and_its_trace_agrees_with_the_usage(page, server, problems) -> None:
    page.add_init_script(KEEP_ANSWERS)
    open_page(page, server)
    lengths = set()
    say(page, "Say the alphabet, please. Then say it again.", temperature=0, max_tokens=40)
    answer = page.locator(".message.assistant .body").first
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
    while page.locator("#stop").is_visible():
        lengths.add(len(answer.inner_text()))
        page.wait_for_timeout(20)
    assert len(lengths) > 5, "the answer did not grow bit by bit"
    # Goes with all that was said before, most of which is in the cache now.
    say(page, "Thank you.", max_tokens=7)
    expect(page.locator(".message.assistant .foot")).to_have_count(2)

    stream = page.evaluate("answers[1]")
    usage = json.loads(re.findall(r'"usage":(\{.*?\}\})', stream)[-1])
    num_prompt, num_output = usage["prompt_tokens"], usage["completion_tokens"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_cached > 0
    expect(page.locator(".message.assistant .foot").nth(1)).to_contain_text(
        re.compile(rf"^{num_output} tokens.* {num_cached} cached")
    )
    page.locator("text=Show trace").nth(1).click()
    story = page.locator("#trace .story")
    expect(story).to_contain_text(
        f"Prompt of {num_prompt} tokens, {num_cached} of them from the cache"
    )
    expect(story).to_contain_text(f"{num_prompt - num_cached} computed in 1 step")
    expect(story).to_contain_text(f"{num_output} tokens, the first after")
    is_cut = '"finish_reason":"length"' in stream
    why = "The limit of 7 tokens was reached." if is_cut else "The model ended its answer."
    expect(story).to_contain_text(why)
    row = page.locator("#rows tr.selected td")
    for place, number in enumerate((num_prompt, num_cached, num_output), start=1):
        expect(row.nth(place)).to_have_text(str(number))
    assert page.locator("#trace svg.timeline .token").get_attribute("d").count("M") == num_output
    page.click("text=As a table")
    assert page.locator(".events tr", has_text="generated").count() == num_output
    assert problems == []


def test_text_is_never_markup(page, server, problems) -> None:
    open_page(page, server)
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    say(page, f"{evil}\n```\n<b>{evil}</b>\n```\nRepeat that.", max_tokens=12, system=evil)
    expect(page.locator(".message.assistant .foot")).to_be_visible()
    assert evil in page.locator(".message.user p").first.inner_text()
    assert page.locator(".message.user pre").inner_text() == f"<b>{evil}</b>"
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == "demo – cardan"
    assert problems == []


def test_the_keyboard_is_enough(page, server, problems) -> None:
    open_page(page, server)
    keyboard = page.keyboard
    expect(page.locator("#message")).to_be_focused()
    keyboard.type("First line")
    keyboard.press("Shift+Enter")
    keyboard.type("Count to one thousand.")
    keyboard.press("Enter")
    expect(page.locator(".message.user p")).to_have_text("First line\nCount to one thousand.")
    body = page.locator(".message.assistant .body")
    expect(body).not_to_be_empty()
    keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message.assistant .foot")).to_contain_text("stopped")
    server.wait_idle()
    expect(page.locator("#rows tr").first).to_contain_text("ended early")
    seen = set()
    for _ in range(40):
        keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none", seen
        if page.evaluate("document.activeElement.matches('#rows button')"):
            break
    keyboard.press("Enter")
    expect(page.locator("#trace .story")).to_contain_text("It was ended early")
    expect(page.locator("#trace h3")).to_be_focused()
    assert problems == []


def test_live_numbers_move_with_the_load(page, server, problems) -> None:
    open_page(page, server)
    ended = httpx.get(f"{server.url}/cardan/requests").json()["recent"]
    with ThreadPoolExecutor(4) as pool:
        posts = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=120)
            for _ in range(4)
        ]
        expect(page.locator("[data-card=num_running] strong").first).to_have_text("4")
        expect(page.locator("#rows tr.live")).to_have_count(4)
        page.locator("#rows tr.live button").first.click()
        expect(page.locator("#trace .story")).to_contain_text("It is answering.")
        highest = {"output_tokens_per_second": 0.0, "kv_usage": 0.0, "steps_per_second": 0.0}
        while not all(post.done() for post in posts):
            for card in highest:
                highest[card] = max(highest[card], numbers(page, card)[0])
            page.wait_for_timeout(100)
        assert all(post.result().status_code == 200 for post in posts)
    assert min(highest.values()) > 0
    expect(page.locator("[data-card=num_running] strong").first).to_have_text("0")
    expect(page.locator("[data-card=kv_usage] strong")).to_have_text("0 %")
    expect(page.locator("#count")).to_have_text(f"0 live, {len(ended) + 4} ended")
    expect(page.locator("#trace .story")).to_contain_text("The limit of 60 tokens was reached.")
    assert page.locator("[data-card=num_running] path.line.first").get_attribute("d").count("L") > 3
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_themes(page, server, problems, scheme) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    open_page(page, server)
    say(page, "Hi", max_tokens=3)
    page.click("text=Show trace")
    expect(page.locator("#trace .story")).to_be_visible()
    page.click("#show-settings")
    page.click("text=Engine")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    found = page.evaluate(
        CONTRAST, "h1, h2, h3, p, button, label, th, td, dt, dd, li, strong, code"
    )
    assert len(found) > 50
    assert [item for item in found if item[0] < 4.5] == []
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    same = page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    assert same == (scheme == "dark")
    assert problems == []


def test_it_fits_a_phone(page, server, problems) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    open_page(page, server)
    say(page, "Write " + "averylongwordwithoutanyspaceinit" * 4, max_tokens=5)
    expect(page.locator(".message.assistant .foot")).to_be_visible()
    page.click("text=Show trace")
    expect(page.locator("#trace .story")).to_be_visible()
    for view in ("chat", "live", "requests"):
        page.click(f"[data-shows={view}]")
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.locator("main > section:visible").count() == 1
        wide = "[document.documentElement, document.querySelector('main')].map(e => e.scrollWidth)"
        assert page.evaluate(wide) == [360, 360]
    for width in (480, 700, 960, 961, 1250, 1251, 1600):
        page.set_viewport_size({"width": width, "height": 640})
        assert page.evaluate(wide)[0] == width
        cut = "[...document.querySelectorAll('th')].filter(e => e.scrollWidth > e.clientWidth)"
        assert page.evaluate(f"{cut}.map(e => e.textContent)") == [], width
    page.set_viewport_size({"width": 360, "height": 640})
    small = """
    [...document.querySelectorAll("button, summary")]
      .filter((node) => node.checkVisibility())
      .filter((node) => node.getBoundingClientRect().height < 18)
      .map((node) => node.textContent)
    """
    assert page.evaluate(small) == []
    assert problems == []


def test_keys_and_a_dead_engine(page, tmp_path, problems) -> None:
    arguments = (*ARGUMENTS, "--api-key", KEY, "--max-engine-restarts", "0")
    with serving(tmp_path / "log", *arguments) as server:
        page.goto(f"{server.url}/")
        expect(page.locator("#key-dialog")).to_be_visible()
        assert problems == [], "nothing is asked of the server before there is a key"
        page.keyboard.press("Escape")
        expect(page.locator("#key-dialog")).to_be_visible()
        page.keyboard.type("a wrong one")
        page.keyboard.press("Enter")
        expect(page.locator("#key-text")).to_have_text("The server did not take that key.")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        say(page, "Count to one thousand.")
        expect(page.locator(".message.assistant .body")).not_to_be_empty()
        server.engine.kill()
        expect(page.locator("#state")).to_have_text("dead")
        expect(page.locator("#banner")).to_contain_text("The engine is dead, requests are refused:")
        expect(page.locator(".message.failed .foot")).to_contain_text("Error: ")
        say(page, "Are you there?")
        expect(page.locator(".message.failed")).to_have_count(2)
        threading.Thread(target=server.process.terminate).start()
        expect(page.locator("#banner")).to_contain_text("No connection to the server.")
    assert [text for text in problems if not REFUSED.search(text)] == []

"""The page of `fednca serve` in a real browser; screenshots go to FEDNCA_SCREENSHOTS or to a temporary folder."""

import base64
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import free_port
from PIL import Image
from playwright.sync_api import sync_playwright

from fednca.models.overlay import overlay
from fednca.use.serve import enlarge

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]

# The server writes down every address it connects to or looks up.
SERVER = """
import sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments
        if isinstance(address, tuple):
            with open(sys.argv[1], "a") as file:
                file.write(f"{address[0]}\\n")
sys.addaudithook(watch)
from fednca.cli.app import main
sys.exit(main(sys.argv[2:]))
"""

DROP = """
([content, name]) => {
    const bytes = Uint8Array.from(atob(content), sign => sign.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, {type: "image/png"}));
    return transfer;
}
"""


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    """Start the server, yield its address and the file of addresses it talked to, and stop it by Ctrl-C."""
    log = tmp_path_factory.mktemp("serve") / "addresses"
    words = [str(log), "serve", str(run.folder), "--port", str(free_port()), "--max-mb", "1"]
    proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}  # nobody is there
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *words], stdout=subprocess.PIPE, text=True, env=os.environ | proxies
    )
    try:
        url, _, rest = process.stdout.readline().partition(" ")
        assert rest == "(Ctrl-C stops)\n"
        yield url, log
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return the folder for screenshots."""
    folder = Path(os.environ.get("FEDNCA_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def page(served, browser):
    """Open the page; afterwards nothing but the server must have been asked for anything."""
    url, _ = served
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(60_000)
    asked, errors = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: errors.append(error))
    opened.goto(url)
    opened.wait_for_selector("#examples img")
    yield opened
    assert errors == []
    assert {address for address in asked if not address.startswith((url, "data:", "blob:"))} == set()
    opened.close()


def drop(page, path, place="#drop button"):
    """Drop a file onto a place of the page as a hand would."""
    content = base64.b64encode(path.read_bytes()).decode()
    transfer = page.evaluate_handle(DROP, [content, path.name])
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event(place, event, {"dataTransfer": transfer})


def shown(page, place):
    """Fetch the pixels of a picture on the page."""
    source = page.locator(f"#{place} img").get_attribute("src")
    return np.asarray(Image.open(io.BytesIO(page.request.get(source).body())).convert("RGB"))


def numbers(page):
    """Read the bars: probability in percent by class, in the order shown."""
    names, values = (page.locator(f"#probabilities .{kind}").all_inner_texts() for kind in ("name", "number"))
    return dict(zip(names, values, strict=True))


def test_an_image_is_dropped_and_the_class_switched(page, model, tmp_path, test_images, pictures):
    pixels = test_images[20]
    Image.fromarray(pixels).save(tmp_path / "mine.png")
    drop(page, tmp_path / "mine.png")
    page.wait_for_selector("#evidence img")
    (scores,) = model.probabilities([pixels]).tolist()
    order = np.argsort(scores, kind="stable")[::-1]
    expected = {model.classes[c]: f"{100 * scores[c]:.1f}%" for c in order}
    assert numbers(page) == expected
    assert page.locator("#shown").inner_text() == "mine.png"
    found = {name for name, p, t in zip(model.classes, scores, model.thresholds.tolist(), strict=True) if p > t}
    assert set(page.locator("#probabilities .name.found").all_inner_texts()) == found
    likeliest, other = int(order[0]), int(order[-1])
    assert page.locator("#class input").input_value() == model.classes[likeliest]
    large = enlarge(pixels)
    np.testing.assert_array_equal(shown(page, "image"), large)

    def drawn(number):
        return overlay(large, model.evidence(pixels[None], [number])[0, 0])

    np.testing.assert_array_equal(shown(page, "evidence"), drawn(likeliest))
    page.screenshot(path=pictures / "serve-dropped.png", full_page=True)

    before = page.locator("#evidence img").get_attribute("src")
    page.locator("#class input").click()
    page.get_by_role("option", name=model.classes[other], exact=True).click()
    page.wait_for_function("before => document.querySelector('#evidence img').src !== before", arg=before)
    np.testing.assert_array_equal(shown(page, "evidence"), drawn(other))
    assert (drawn(other) != drawn(likeliest)).any()
    page.screenshot(path=pictures / "serve-switched.png", full_page=True)


def test_examples_can_be_clicked(page, model, pictures):
    assert page.locator("#examples img").count() == 8
    page.locator("#examples button").nth(2).click()
    page.wait_for_selector("#evidence img")
    assert page.locator("#shown").inner_text().startswith("Test image that shows ")
    assert sorted(numbers(page)) == sorted(model.classes)
    page.screenshot(path=pictures / "serve-example.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.wait_for_selector("#examples img")
    page.locator("#examples button").nth(0).click()
    page.wait_for_selector("#evidence img")
    page.screenshot(path=pictures / "serve-dark.png", full_page=True)


def test_garbage_is_told_and_the_next_image_works(page, image_folder, tmp_path, pictures):
    (tmp_path / "garbage.png").write_bytes(bytes(range(256)) * 40)
    drop(page, tmp_path / "garbage.png")
    page.wait_for_selector("#message .problem")
    assert page.locator("#message").inner_text().startswith("'garbage.png' is not an image of a known format")
    assert page.locator("#evidence img").count() == 0
    page.screenshot(path=pictures / "serve-garbage.png", full_page=True)
    drop(page, image_folder / "0.png", "#image")  # anywhere will do
    page.wait_for_selector("#evidence img")
    assert page.locator("#message .problem").count() == 0
    assert page.locator("#shown").inner_text() == "0.png"


def test_a_file_that_is_too_large_is_refused(page, image_folder, tmp_path, pictures):
    (tmp_path / "huge.png").write_bytes(b"x" * (2**20 + 1))
    drop(page, tmp_path / "huge.png")
    page.get_by_text("exceed the maximum allowed size").wait_for()
    page.screenshot(path=pictures / "serve-huge.png")
    drop(page, image_folder / "0.png")
    page.wait_for_selector("#evidence img")


def test_the_server_talks_to_this_machine_only(page, served):
    addresses = set(served[1].read_text().split())
    assert "127.0.0.1" in addresses  # it was listened to
    assert addresses <= {"127.0.0.1", "localhost", "::1", "None"}

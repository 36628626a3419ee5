import os
import signal
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import free_port
from PIL import Image

from fednca.models.overlay import overlay
from fednca.use.data import Example
from fednca.use.serve import Page, bars, enlarge, heading, is_loopback, problem


class Texts(HTMLParser):
    """Collects each element's class, style and text."""

    def __init__(self, text):
        super().__init__()
        self.seen = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append([dict(attributes), ""])

    def handle_data(self, data):
        self.seen[-1][1] += data

    def of(self, kind):
        return [(facts, text) for facts, text in self.seen if kind in facts.get("class", "").split()]


@pytest.fixture
def page(model, test_images, tmp_path):
    """The page's reactions; updates of its parts are plain dicts."""
    (tmp_path / "examples").mkdir()
    examples = [Example(test_images[0], ("one",)), Example(test_images[1], ())]
    return Page(model, examples, tmp_path / "examples", SimpleNamespace(update=dict))


def test_bars_are_sorted_and_marked_at_the_thresholds():
    model = SimpleNamespace(classes=("a<b>", "c", "d"), thresholds=np.array([0.25, 0.5, 0.75]))
    found = Texts(bars(model, [0.3, 0.9, 0.6]))
    assert [text for _, text in found.of("name")] == ["c", "d", "a<b>"]
    assert [text for _, text in found.of("number")] == ["90.0%", "60.0%", "30.0%"]
    assert [facts["style"] for facts, _ in found.of("bar")] == ["width: 90.00%", "width: 60.00%", "width: 30.00%"]
    assert [facts["style"][:16] for facts, _ in found.of("mark")] == [
        "left: calc(50.00",
        "left: calc(75.00",
        "left: calc(25.00",
    ]
    assert [text for facts, text in found.of("name") if "found" in facts["class"]] == ["c", "a<b>"]


def test_an_upload_shows_probabilities_image_and_evidence(page, model, image_folder):
    path = str(image_folder / "4.png")
    message, shown, chosen, name, picture, drawn, kept, emptied = page.look_at_upload(path)
    (scores,) = model.probabilities([path]).tolist()
    assert message == {"value": "", "visible": False}
    assert shown == bars(model, scores)
    likeliest = model.classes[int(np.argmax(scores))]
    assert chosen == {"value": likeliest, "interactive": True}
    assert (name, kept, emptied) == ("4.png", path, None)
    pixels = np.asarray(Image.open(path).convert("RGB"))
    np.testing.assert_array_equal(picture, pixels.repeat(24, 0).repeat(24, 1))
    np.testing.assert_array_equal(drawn, page.show(path, likeliest))
    other = next(number for number, each in enumerate(model.classes) if each != likeliest)
    expected = overlay(picture, model.evidence(pixels[None], [other])[0, 0])
    np.testing.assert_array_equal(page.show(path, model.classes[other]), expected)


def test_examples_say_what_they_show(page):
    assert page.look_at_example(0)[3] == "Test image that shows one"
    assert page.look_at_example(1)[3] == "Test image that shows none of the classes"


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"<svg onload=alert(1)>", bytes(range(256)) * 9])
def test_garbage_is_a_sentence_on_the_page(page, tmp_path, content):
    path = tmp_path / "<b>.png"
    path.write_bytes(content)
    message, shown, chosen, name, *rest = page.look_at_upload(str(path))
    assert message["visible"]
    assert "&lt;b&gt;.png" in message["value"]
    assert str(tmp_path) not in message["value"]
    assert (shown, chosen, name, rest) == ("", {"value": None, "interactive": False}, "Image", [None] * 4)


def test_nothing_is_drawn_before_an_image_is_there(page):
    assert page.show(None, "one") is None
    assert page.show("x.png", None) is None


def test_other_problems_do_not_tell_where_the_file_is():
    assert "not enough" not in problem("/tmp/x/a.dcm", MemoryError())
    assert "needs more memory than there is" in problem("/tmp/x/a.dcm", MemoryError())
    told = problem("/tmp/x/a.dcm", Exception("image '/tmp/x/a.dcm' is DICOM"))
    assert "image &#x27;a.dcm&#x27; is DICOM" in told


def test_small_pictures_are_enlarged_and_large_ones_stay():
    assert enlarge(np.zeros((16, 8, 3), np.uint8)).shape == (384, 192, 3)
    assert enlarge(np.zeros((300, 700, 3), np.uint8)).shape == (300, 700, 3)


def test_the_heading_says_what_must_be_known(model):
    assert heading(model).startswith("# fednca-ml on digits\n10 classes, round ")
    unfinished = SimpleNamespace(**vars(model) | {"note": "the run is not finished", "calibrated": False})
    assert "**The run is not finished.**" in heading(unfinished)
    assert "threshold 0.5 for every class" in heading(unfinished)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((host, True) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", "")),
    ],
)
def test_which_addresses_are_this_machines_own(host, own):
    assert is_loopback(host) is own


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_service_leaves_no_images_behind(run, tmp_path, stop):
    code = "import sys; from fednca.cli.app import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "serve", str(run.folder), "--port", str(free_port())]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        assert "http" in process.stdout.readline()
        assert list(tmp_path.glob("fednca-*/*"))  # the examples' images
        process.send_signal(stop)
        process.communicate(timeout=300)
        assert process.returncode == 128 + stop
        assert not list(tmp_path.glob("fednca-*"))
    finally:
        process.kill()
        process.wait()

import base64
import json
import re
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fednca.base.errors import FedncaError
from fednca.report import page as module
from fednca.report.facts import load_federations, page_facts
from fednca.report.groups import group_runs
from fednca.report.page import as_uri, render, watch_page, write_page


class Reader(HTMLParser):
    """Collects elements, their attributes and the text of scripts and title."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        self.text[self.inside] = self.text.get(self.inside, "") + data

    @property
    def data(self):
        return json.loads(self.text["data"], parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "new" / "report.html"
    assert write_page(runs, out)
    return out.read_text(encoding="utf-8")


def test_the_page_holds_the_numbers_of_the_results_files(written, runs):
    data = Reader(written).data
    own = json.loads((runs[2].folder / "results.json").read_text())
    found = data["groups"][1]["results"]
    for way in ("val", "paper", "last"):
        for metric, value in found[way]["test"].items():
            assert value["mean"] == own[way]["test"][metric]
        assert [each["mean"] for each in found[way]["classes"]["class_f1"]] == own[way]["test"]["class_f1"]


def test_the_page_needs_nothing_else(written):
    reader = Reader(written)
    for tag, attributes in reader.tags:
        assert tag not in {"link", "iframe", "object"}
        assert not attributes.get("src")
        assert not attributes.get("href")
    assert "default-src 'none'" in next(a["content"] for _, a in reader.tags if a.get("http-equiv"))
    assert not re.search(r"https?://|@import|url\((?!#)", written)
    assert len(written) < 2_000_000


def test_names_cannot_break_out_of_the_page(runs):
    groups = group_runs(runs)
    facts = page_facts(groups, load_federations(groups)) | {"pictures": [], "no_pictures": "none"}
    bad = '</script><script>alert(1)</script><!-- {{data}} & \u2028 "'
    facts["groups"][0]["label"] = bad
    facts["settings"][0]["classes"][0] = bad
    reader = Reader(render(facts))
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert reader.data["settings"][0]["classes"][0] == bad
    assert "<script>" in reader.text["title"]  # as text, since the parser has undone the escape


def test_pictures_are_the_models_own(written, runs):
    data = Reader(written).data
    (shown,) = data["pictures"]
    test = runs[0].federation.dataset.test
    assert [look["group"] for look in shown["looks"]] == [0, 1]
    for look in shown["looks"]:
        assert len(look["tsne"]["points"]) == (test.labels == 1).sum()  # fewer than the page's limit
        np.testing.assert_allclose(np.diag(look["cosine"]), 1)
        assert [len(own) for own in look["evidence"]] == [len(example["classes"]) for example in shown["examples"]]
        assert all(0 <= cell["probability"] <= 1 for own in look["evidence"] for cell in own)
    first = shown["examples"][0]
    found = [row for row, image in enumerate(test.images) if np.array_equal(image, decode(first["image"]))]
    assert any(first["classes"] == np.flatnonzero(test.labels[row] == 1).tolist() for row in found)


def decode(uri):
    head, _, content = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(BytesIO(base64.b64decode(content))))


def test_large_pictures_are_shrunk():
    with Image.open(BytesIO(base64.b64decode(as_uri(np.zeros((500, 400, 3), np.uint8)).partition(",")[2]))) as image:
        assert image.size == (179, 224)


def test_a_run_that_goes_on_has_no_pictures_and_says_so(open_run, tmp_path):
    assert not write_page([open_run], tmp_path / "report.html")
    data = Reader((tmp_path / "report.html").read_text()).data
    assert data["pictures"] == []
    assert data["no_pictures"] == "No run is finished yet."
    assert not data["finished"]


def test_a_model_that_cannot_be_loaded_leaves_the_rest_of_the_page(runs, tmp_path, monkeypatch):
    look = module.look

    def look_at_some(run, *arguments):
        if run.config.method.name == "fedavg":
            raise FedncaError("the table of texts is gone")
        return look(run, *arguments)

    monkeypatch.setattr(module, "look", look_at_some)
    assert write_page(runs, tmp_path / "report.html")
    data = Reader((tmp_path / "report.html").read_text()).data
    assert data["no_pictures"] == "fedavg: the table of texts is gone"
    assert [own["group"] for own in data["pictures"][0]["looks"]] == [1]


def test_watching_ends_with_the_last_run(runs, tmp_path, monkeypatch):
    written, waited = [], []
    answers = iter([False, False, True])
    monkeypatch.setattr(module, "write_page", lambda runs, out, pictures: written.append(pictures) or next(answers))
    watch_page(runs, tmp_path / "report.html", sleep=waited.append)
    assert len(written) == 3
    assert waited == [30, 30]


def test_a_place_that_cannot_be_written_is_one_sentence(runs, tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(FedncaError, match=r"cannot write '.*file/report.html'"):
        write_page(runs, tmp_path / "file" / "report.html", pictures=False)

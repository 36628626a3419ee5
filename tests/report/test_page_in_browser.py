"""The report in an installed Chromium: what is shown, what choices change, and that nothing is fetched.

Screenshots go to the folder that FEDNCA_SCREENSHOTS names, else to pytest's temporary one.
"""

import json
import os
from pathlib import Path

import pytest

from fednca.report import page as module
from fednca.report.page import write_page

pytestmark = pytest.mark.browser
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=FLAGS
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    folder = Path(os.environ.get("FEDNCA_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(runs, path)
    return path


@pytest.fixture
def opened(browser):
    """Open a page, and fail at the end if it complained or asked for anything but itself."""
    complaints, pages = [], []

    def open_page(path, **options):
        page = browser.new_page(viewport={"width": 1366, "height": 768}, **options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url == path.as_uri() or request.url.startswith("data:") or complaints.append(request.url)
            ),
        )
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []


def table(page, place):
    return [[cell.inner_text() for cell in row.locator("th,td").all()] for row in page.locator(f"{place} tr").all()]


def test_the_table_shows_the_results_of_the_chosen_round(opened, report, runs):
    page = opened(report)
    assert page.locator("#state").inner_text() == "finished"
    results = json.loads((runs[2].folder / "results.json").read_text())
    for way in ("last", "paper", "val"):
        page.click(f"[data-choice='way:{way}']")
        head, _, row = table(page, "#results-table")
        shown = dict(zip(head, row, strict=True))
        assert row[0].strip() == "fednca-ml"
        assert shown["macro-AUC"] == f"{100 * results[way]['test']['macro_auc']:.1f}"
        assert shown["micro-F1"] == f"{100 * results[way]['test']['micro_f1']:.1f}"
        assert shown["round"] == str(results[way]["round"])
    assert shown["macro-F1 cal."] == f"{100 * results['val']['calibrated']['test']['macro_f1']:.1f}"
    assert "±" in table(page, "#results-table")[1][1]  # two seeds


def test_a_method_can_be_hidden_everywhere_and_stays_so_after_a_reload(opened, report):
    page = opened(report)
    lines = page.locator("#curves-chart polyline")
    assert [line.get_attribute("data-series") for line in lines.all()] == ["0", "1"]
    assert page.locator("#curves-chart polygon").count() == 1  # the band of the two seeds
    assert page.locator("#pictures .panels").first.locator("svg[role=img]").count() == 2
    page.click("[data-group='fedavg']")
    assert page.locator("[data-group='fedavg']").get_attribute("aria-pressed") == "false"
    assert [line.get_attribute("data-series") for line in lines.all()] == ["1"]
    assert len(table(page, "#results-table")) == 2
    assert page.locator("#pictures .panels").first.locator("svg[role=img]").count() == 1
    page.reload()
    assert [line.get_attribute("data-series") for line in lines.all()] == ["1"]
    page.click("[data-group='fedavg']")
    assert lines.count() == 2


def test_hovering_tells_the_values_of_a_round(opened, report, runs):
    page = opened(report)
    page.locator("#curves-chart .hit").nth(1).hover()
    tip = page.locator("#tip")
    text = tip.inner_text()
    values = [run.history[1]["test"]["macro_f1"] for run in runs]
    assert text.startswith("round 2")
    assert f"{100 * values[2]:.1f}" in text
    assert f"{100 * min(values[:2]):.1f} to {100 * max(values[:2]):.1f}" in text
    page.click("[data-choice='metric:macro_auc']")
    page.locator("#curves-chart .hit").nth(1).hover()
    assert f"{100 * runs[2].history[1]['test']['macro_auc']:.1f}" in tip.inner_text()
    page.click("[data-choice='metric:macro_f1_calibrated']")
    page.locator("#curves-chart .hit").nth(1).hover()
    assert f"{100 * runs[2].history[1]['calibrated']['test']['macro_f1']:.1f}" in tip.inner_text()
    page.locator("h1").hover()
    assert tip.is_hidden()


@pytest.fixture
def changed(runs, tmp_path, monkeypatch):
    """Write a report whose facts a function has changed."""
    before = module.page_facts

    def write(change):
        def changed_facts(*arguments):
            facts = before(*arguments)
            change(facts)
            return facts

        monkeypatch.setattr(module, "page_facts", changed_facts)
        write_page(runs, tmp_path / "report.html", pictures=False)
        return tmp_path / "report.html"

    return write


def test_classes_stand_from_the_rarest_on(opened, changed):
    def count_otherwise(facts):
        for client in facts["settings"][0]["report"]["clients"]:
            client["positives"] = {name: 7 * c % 10 for c, name in enumerate(client["positives"])}

    chart = opened(changed(count_otherwise)).locator(".class-chart")
    # 7c mod 10 is 0, 1, 2, … at c = 0, 3, 6, 9, 2, 5, 8, 1, 4, 7
    expected = ["zero", "three", "six", "nine", "two", "five", "eight", "one", "four", "seven"]
    assert chart.locator("text.name").all_text_contents() == expected
    assert "27" in chart.locator("text").all_text_contents()  # three clients with nine each
    assert chart.locator("[data-tip]:not(.hit)").count() == 20  # a sign for each class and method


def test_the_partition_and_the_clients_are_drawn(opened, report, runs):
    page = opened(report)
    federation = runs[0].federation
    labels = [federation.train.client(k)[1] for k in range(3)]
    held = sum(int((own == 1).any(axis=0).sum()) for own in labels)
    assert page.locator(".stacked rect[data-tip]").count() == held
    assert page.locator(".bubbles circle[opacity]").count() == held
    rows = table(page, "#clients-table")[1:]
    assert [row[1] for row in rows] == [str(len(own)) for own in federation.train.partition.clients]
    assert page.locator("#clients-chart polyline").count() == 3
    assert page.locator(".loss-chart svg").count() == 3
    assert page.locator(".collapse-chart svg").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_light_and_dark(opened, report, screenshots, scheme):
    page = opened(report, color_scheme=scheme)
    page.screenshot(path=screenshots / f"report-{scheme}.png", full_page=True)
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.querySelector('section')).backgroundColor]"
    )
    assert contrast(ink, paper) > 7  # WCAG's level AAA
    quiet = page.evaluate("getComputedStyle(document.querySelector('.quiet')).color")
    assert contrast(quiet, paper) > 4.5
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def contrast(*colours):
    """The contrast ratio of two colours as WCAG 2 defines it."""
    light = []
    for colour in colours:
        channels = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_print_is_light_and_without_buttons(opened, report, screenshots):
    page = opened(report, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".choices").first.is_hidden()
    page.screenshot(path=screenshots / "report-print.png", full_page=True)
    assert page.pdf(path=screenshots / "report.pdf", format="A4").startswith(b"%PDF")


def test_a_run_that_goes_on_says_so_and_comes_again(opened, open_run, tmp_path):
    path = tmp_path / "report.html"
    write_page([open_run], path)
    page = opened(path)
    assert "round 2 of 3" in page.locator("#state").inner_text()
    assert "No run is finished yet." in page.locator("#pictures").inner_text()
    assert "--collapse true" in page.locator("#collapse").inner_text()


def test_a_page_of_a_run_that_goes_on_reloads_after_half_a_minute(browser, open_run, tmp_path):
    path = tmp_path / "report.html"
    write_page([open_run], path)
    page = browser.new_page()
    page.clock.install()
    page.goto(path.as_uri())
    page.evaluate("window.old = true")
    page.clock.run_for(29_000)
    assert page.evaluate("window.old") is True
    with page.expect_navigation():
        page.clock.run_for(2_000)
    assert page.evaluate("window.old ?? null") is None
    page.close()


def test_names_of_classes_are_text(opened, changed):
    bad = "<img src=x onerror=alert(1)>"

    def rename(facts):
        setting = facts["settings"][0]
        setting["classes"][0] = setting["stacked"]["names"][0] = facts["groups"][0]["label"] = bad
        for client in setting["report"]["clients"]:
            client["positives"][bad] = client["positives"].pop("zero")

    page = opened(changed(rename))
    assert page.locator("img[src=x]").count() == 0
    assert bad in page.locator(".legend").inner_text()
    page.locator(".bubbles circle").first.hover()
    assert bad in page.locator("#tip").inner_text()
    assert page.locator("img[src=x]").count() == 0

"""What docs/architecture.md promises about the code."""

import re
from pathlib import Path

import walks

ARCHITECTURE = (Path(__file__).parents[1] / "docs/architecture.md").read_text()


def test_the_walks_are_short_and_the_page_shows_them(tmp_path):
    image, weight = walks.walk_of_an_image(tmp_path), walks.walk_of_a_weight()
    assert len(image) <= 14
    assert len(weight) <= 8
    for what, modules in (("image, from file to logit", image), ("weight, in an eager round", weight)):
        assert f"{what}: {len(modules)} modules\n  {' → '.join(modules)}\n" in ARCHITECTURE


def test_the_page_names_every_room_and_no_other():
    rooms = {path.parent.name for path in walks.ROOT.glob("*/__init__.py")}
    table = ARCHITECTURE.partition("## Rooms")[2].partition("\n## ")[0]
    named = {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.partition("|")[2].partition("|")[0])
    }
    assert named == rooms


def test_the_glossary_is_short():
    glossary = ARCHITECTURE.partition("## Glossary")[2].partition("\n## ")[0]
    assert len([line for line in glossary.splitlines() if line.startswith("| ")]) <= 21  # with the head


def test_nothing_lies_loose_at_the_root():
    assert {path.name for path in walks.ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fednca

ROOT = Path(fednca.__file__).parent
DOCS = ROOT.parent / "docs" / "api"
INTERNAL = {"cli", "kernels"}  # rooms without a public face
ROOMS = sorted({module.name for module in pkgutil.iter_modules(fednca.__path__) if module.ispkg} - INTERNAL)


def room_of(name: str) -> str:
    return f"fednca.{name}" if name else "fednca"


@pytest.mark.parametrize("name", ["", *ROOMS])
def test_every_public_name_is_what_a_type_checker_takes_it_for(name):
    room = importlib.import_module(room_of(name))
    tree = ast.parse(Path(room.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: node.module for node in imports if node.module.startswith("fednca") for alias in node.names}
    typed.pop("lazy", None)
    assert set(typed) == set(room.__all__)
    for public, home in typed.items():
        assert getattr(room, public) is getattr(importlib.import_module(home), public)
    assert not {module.name for module in pkgutil.iter_modules(room.__path__)} & set(room.__all__)
    assert set(room.__all__) <= set(dir(room))


def test_a_name_that_is_not_public_is_no_attribute_of_a_lazy_room():
    import fednca.runs

    with pytest.raises(AttributeError, match=r"module 'fednca\.runs' has no attribute 'keep_checkpoint'"):
        _ = fednca.runs.keep_checkpoint


def test_the_reference_has_a_page_for_every_room_and_no_other():
    pages = {path.stem: path.read_text() for path in DOCS.glob("*.md")}
    index = pages.pop("index")
    assert sorted(pages) == ROOMS
    for name, text in pages.items():
        assert text == f"# fednca.{name}\n\n::: fednca.{name}\n"
        assert f"({name}.md)" in index
    assert index.endswith("::: fednca\n")


@pytest.mark.parametrize("name", ["", *ROOMS])
def test_a_room_can_be_imported_first_and_a_light_one_stays_light(name):
    heavy = {"models": {"flwr", "matplotlib"}, "measures": {"flwr", "matplotlib"}, "engines": {"flwr", "matplotlib"}}
    slow = heavy.get(name, {"torch", "numpy", "flwr", "matplotlib"})
    code = f"import sys, {room_of(name)}; print({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")

"""What the targets of the Makefile do, asked of `make` itself."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words):
    """Return what make prints at the repository's root, untouched by a make that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL"}}
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_make_alone_lists_every_target():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert re.findall(r"^make (\S+) +\S", make(), re.MULTILINE) == phony


def test_slow_tests_run_in_test_all_alone():
    selected = {target: "not slow" in make("--dry-run", target) for target in ("test", "test-all")}
    assert selected == {"test": True, "test-all": False}

"""Standard output that takes nothing more: one sentence, and how to go on."""

import os
import shlex
import subprocess
import sys

import pytest

from fednca.runs import Run


def shell(line):
    """Return what a line says on standard error; standard output is buffered, as it is unless one asks otherwise."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, env=usual).stderr


@pytest.mark.parametrize(
    ("pipe", "sentence"),
    [
        ("| head -n 1", "nobody reads standard output any more"),
        ("> /dev/full", "cannot write to standard output: No space left on device"),
    ],
)
def test_an_output_that_takes_nothing_more_is_told_and_how_to_go_on(config, tmp_path, pipe, sentence):
    def told(*words):
        command = shlex.join(
            [sys.executable, "-c", "from fednca.cli.app import main; raise SystemExit(main())", *words]
        )
        return shell(f"{command} {pipe}")

    folder, bench = str(tmp_path / "run"), str(tmp_path / "bench")
    most = 1000  # longer than it takes `head` to read a line
    assert (
        told("run", config, "--rounds", str(most), "--out", folder)
        == f"fednca: {sentence}; go on with `fednca resume {folder}`\n"
    )
    assert 0 < len(Run(folder).history) < most
    methods = ["--methods", "fedavg", "--seeds", "2"]
    assert (
        told("bench", config, *methods, "--rounds", "20", "--out", bench)
        == f"fednca: {sentence}; repeat the command to go on\n"
    )


@pytest.mark.parametrize(
    ("pipe", "code", "sentence"),
    [
        ("| true", 1, ""),
        ("> /dev/full", 2, "fednca: cannot write to standard output: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
@pytest.mark.parametrize("words", ["--version", "--help", "methods", "methods fednca-ml"])
def test_a_command_ends_well_without_standard_output(words, pipe, code, sentence):
    # select waits until nobody reads the pipe any more
    wait = "pipe = select.poll(); pipe.register(1, 0); 'true' in sys.argv.pop() and pipe.poll()"
    run = f"import select, sys; {wait}; from fednca.cli.app import main; sys.exit(main())"
    command = shlex.join([sys.executable, "-c", run, *words.split(), pipe])
    assert shell(f"({command}; echo $? >&2) {pipe}") == f"{sentence}{code}\n"

"""Builds of a store by scripts: at the same time, killed, interrupted, on a full disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fednca.data.store import open_store, verify_store
from fednca.data.types import FileImages

SIZE = 8

# Scripts without the guard that spawned processes ask for, as people write them.
SCRIPT = """
import multiprocessing, resource, sys, time
from pathlib import Path
from fednca.data.store import open_store
from fednca.data.types import FileImages
from fednca.base.errors import FedncaError

paths = tuple(sorted(Path(sys.argv[1]).iterdir())) * 20
def build(progress=None):
    return open_store(FileImages(paths), 8, folder=Path(sys.argv[2]), workers=3, progress=progress)
def linger(done, total):
    if not done:  # no worker has begun
        return
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def start(script: str, files: FileImages, cache: Path) -> subprocess.Popen[str]:
    path = cache.with_name("script.py")
    path.write_text(script)
    command = [sys.executable, str(path), str(files.paths[0].parent), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_two_processes_may_build_the_same_store(files, cache):
    wait = "while time.time() < float({at}): pass\nprint(len(build().images))"
    script = SCRIPT + wait.format(at=time.time() + 1.5)
    builds = [start(script, files, cache) for _ in range(2)]
    assert [build.communicate(timeout=300) for build in builds] == [("800\n", "")] * 2
    (folder,) = cache.iterdir()
    verify_store(folder)


def test_a_script_is_not_run_again_by_its_workers(files, cache):
    script = SCRIPT + "print('once')\nprint(len(build().images))"
    assert start(script, files, cache).communicate(timeout=300) == ("once\n800\n", "")


def test_a_kill_leaves_neither_store_nor_workers_and_the_next_build_clears_up(files, cache):
    build = start(SCRIPT + "build(linger)", files, cache)
    workers = [int(word) for word in build.stdout.readline().split()]
    assert len(workers) == 2
    build.kill()
    build.communicate(timeout=300)
    (left,) = cache.iterdir()
    assert left.suffix == ".partial"
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
    stored = open_store(files, SIZE, folder=cache)
    assert list(cache.iterdir()) == [stored.folder]


def test_a_living_build_of_somebody_else_is_left_alone(files, cache):
    build = start(SCRIPT + "build(linger)", files, cache)
    build.stdout.readline()
    (site,) = cache.iterdir()
    stored = open_store(files, SIZE, folder=cache)
    assert set(cache.iterdir()) == {site, stored.folder}
    os.killpg(build.pid, signal.SIGKILL)
    build.communicate(timeout=300)


def test_ctrl_c_clears_up(files, cache):
    build = start(SCRIPT + "build(linger)", files, cache)
    build.stdout.readline()
    os.killpg(build.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, errors = build.communicate(timeout=300)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(files, cache):
    """No file may grow beyond a limit: the system's answer to a write is then an error, as on a full disk."""
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    build()
except FedncaError as error:
    print(error)
"""
    output, errors = start(SCRIPT + script, files, cache).communicate(timeout=300)
    assert errors == ""
    assert output.startswith(f"cannot write '{cache}")
    assert output.endswith("': File too large; fix that or choose another place\n")
    assert list(cache.iterdir()) == []

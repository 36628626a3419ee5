import multiprocessing

import pytest
from helpers import tiny
from parity import start

from fednca.engines.processes import ProcessEngine


@pytest.fixture
def no_worker_is_left():
    """End what a test has left behind, and tell."""
    yield
    left = multiprocessing.active_children()
    for child in left:
        child.kill()
    assert left == []


@pytest.fixture
def fedavg():
    """A job whose engine is the eager one, its server, and two workers for it."""
    job, server = start(tiny(method__name="fedavg"))
    engine = ProcessEngine(job.engine, [job.val, job.test], 2)
    yield job, server, engine
    engine.close()

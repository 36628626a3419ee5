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
    """A workplace, its server, and an engine of two workers for it."""
    place, server = start(tiny(method__name="fedavg"))
    engine = ProcessEngine(place, 2)
    yield place, server, engine
    engine.close()

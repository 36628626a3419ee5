"""Flower's SuperNode, but less patient, as no option of it can be: it looks for messages every 0.3 s and not every 3 s,
and the environment says how often it tells that it is alive, and so how soon the SuperLink takes its silence for death.
"""

import os
import time
from types import SimpleNamespace

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode


def nap(seconds: float) -> None:
    time.sleep(min(seconds, 0.3))


if __name__ == "__main__":
    assert start_client_internal.time is time
    start_client_internal.time = SimpleNamespace(**vars(time) | {"sleep": nap})
    for module in (heartbeat, fleet_http_connection):
        assert module.HEARTBEAT_DEFAULT_INTERVAL
        module.HEARTBEAT_DEFAULT_INTERVAL = int(os.environ["HEARTBEAT_INTERVAL"])
    flower_supernode()

import warnings

import pytest

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # typer uses what click 9 will not have
    from flwr.supercore.task_identity import TaskIdentity

    from fednca.flower import exchange, roster


@pytest.fixture(autouse=True)
def _as_in_a_server_app(monkeypatch):
    """Let messages be made here, as in the process that Flower starts for a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    """Look for answers often."""
    monkeypatch.setattr(roster, "PAUSE", 0.05)
    monkeypatch.setattr(exchange, "POLL", (0.02, 0.02))
    monkeypatch.setattr(exchange, "WATCH", 0.1)

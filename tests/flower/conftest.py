import warnings

import pytest

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # typer uses what click 9 will not have
    from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _as_in_a_server_app(monkeypatch):
    """Let messages be made here, as in the process that Flower starts for a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

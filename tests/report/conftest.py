import pytest
from helpers import Stop, StopAfter, tiny

from fednca.report.groups import find_runs
from fednca.runs import train


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory):
    """Two seeds of FedAvg and one of FedNCA-ML, finished and with neural collapse measured."""
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("fednca-ml", 0)):
        train(tiny(method__name=method, seed=seed, evaluate__collapse=True), folder / f"{method}-{seed}")
    return folder


@pytest.fixture(scope="session")
def runs(runs_folder):
    return find_runs([runs_folder])


@pytest.fixture(scope="session")
def open_run(tmp_path_factory):
    """A run that was stopped after the second of its three rounds."""
    folder = tmp_path_factory.mktemp("open") / "run"
    with pytest.raises(Stop):
        train(tiny(method__name="fednca-ml"), folder, [StopAfter(2)])
    (run,) = find_runs([folder])
    return run

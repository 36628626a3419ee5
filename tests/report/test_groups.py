import pytest
from helpers import tiny

from fednca.base.errors import FedncaError
from fednca.flower.trial import Trial, write_server
from fednca.report.groups import find_runs, group_runs, setting
from fednca.runs import Run


def begun(folder, **changes):
    """A run folder that holds a config and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tiny(**changes).to_toml())
    return Run(folder)


def test_a_folder_of_runs_stands_for_all_of_them_once(tmp_path):
    for name in ("b/seed-1", "a", "b/seed-0"):
        begun(tmp_path / name)
    found = find_runs([tmp_path / "b" / "seed-1", tmp_path])
    assert [str(run.folder.relative_to(tmp_path)) for run in found] == ["b/seed-1", "a", "b/seed-0"]
    with pytest.raises(FedncaError, match="is not a run folder"):
        find_runs([tmp_path / "b" / "nothing"])


def test_the_config_of_another_program_is_no_run(tmp_path):
    begun(tmp_path / "run")
    write_server(Trial(tmp_path, ["north"]), tmp_path)
    assert (tmp_path / "flower/config.toml").is_file()
    assert [run.folder for run in find_runs([tmp_path])] == [tmp_path / "run"]


def test_only_seeds_and_the_way_of_execution_share_a_group(tmp_path):
    changes = [
        {"seed": 1},
        {"seed": 0, "engine": "processes", "threads": 2, "evaluate__collapse": True},
        {"method__name": "fedavg"},
        {"method__options": {"tau": 0.5}},
        {"train__lr": 0.5},
    ]
    groups = group_runs([begun(tmp_path / str(n), **each) for n, each in enumerate(changes)])
    assert [[run.config.seed for run in group.runs] for group in groups] == [[0, 1], [0], [0], [0]]
    assert [group.label for group in groups] == [
        "fednca-ml: lr=0.001, tau=0.3",
        "fedavg",
        "fednca-ml: lr=0.001, tau=0.5",
        "fednca-ml: lr=0.5, tau=0.3",
    ]
    assert len({setting(group) for group in groups}) == 1


def test_many_differences_are_a_folder_in_the_label(tmp_path):
    other = {
        "partition__beta": 0.5,
        "train__lr": 0.5,
        "train__rounds": 9,
        "train__batch_size": 4,
        "data__image_size": 32,
    }
    groups = group_runs([begun(tmp_path / "here"), begun(tmp_path / "there", **other)])
    assert [group.label for group in groups] == [f"fednca-ml in {tmp_path / name}" for name in ("here", "there")]
    assert setting(groups[0]) != setting(groups[1])


def test_a_group_is_shown_by_its_first_finished_run(tmp_path):
    first, second = (begun(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    (group,) = group_runs([first, second])
    assert group.run is first
    (second.folder / "results.json").write_text("{}")
    assert group.run is second

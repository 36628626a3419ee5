"""The command for a whole table: failures and interruptions, as its user sees them."""

from fednca.cli.app import main
from fednca.runs import Run


def test_bench_trains_fails_and_goes_on(config, capsys, tmp_path):
    words = ["bench", config, "--seeds", "1", "--out", str(tmp_path / "bench")]
    words += ["--methods", "fedavg", "fedadam:server_lr=1e38"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "fedavg, seed 0: starts | 0 of 2 runs done" in out
    assert "round 1/2" not in out
    assert "run folders: " in out
    first, second = err.splitlines()
    assert first == "fednca: 1 of 2 runs failed; repeat the command to try them again:"
    assert second.startswith("  fedadam:server_lr=1e+38, seed 0: round ")
    assert "not finite" in err
    assert Run(tmp_path / "bench/fedavg/seed-0").finished
    assert main([*words[:5], str(tmp_path / "bench"), "--methods", "fedavg"]) == 0
    out = capsys.readouterr().out
    assert "starts" not in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("fedavg ")]
    assert row[1] == "1"
    assert all(0 <= float(value) <= 100 for value in row[2:])
    assert len(row) == 8


def test_ctrl_c_says_that_the_same_bench_goes_on(config, capsys, tmp_path, monkeypatch):
    def interrupt(watch, *_):
        watch.executor.stop()
        raise KeyboardInterrupt

    words = ["bench", config, "--methods", "fedavg", "--seeds", "2", "--out", str(tmp_path / "bench")]
    with monkeypatch.context() as patch:
        patch.setattr("fednca.bench.local.Watch.on_round", interrupt)
        assert main(words) == 130
    assert capsys.readouterr().err == "fednca: stopped; 0 of 2 runs are done; repeat the command to go on\n"
    assert main(words) == 0
    assert Run(tmp_path / "bench/fedavg/seed-1").finished

"""The data of the report page as plain JSON: settings, curves, results and speed of runs."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np

from fednca.base.errors import FedncaError
from fednca.bench.rows import show
from fednca.data.facts import partition_report, train_counts
from fednca.data.federation import Federation
from fednca.measures.metrics import SHOWN
from fednca.methods import find_method
from fednca.methods.registry import NONE
from fednca.report.comparison import COLUMNS, value_of
from fednca.report.figures import MOST_STACKED, group_tail, readable
from fednca.report.groups import Group, differing, setting
from fednca.report.published import reported
from fednca.report.tables import CALIBRATED, SELECTIONS, mean_and_std
from fednca.runs import Run
from fednca.runs.history import Line

METRICS = SHOWN | {"mean_ap": "mean AP"}
CURVED = COLUMNS | METRICS
BY_CLASS = {
    "class_f1": "F1 at 0.5",
    "calibrated_f1": "F1 at calibrated thresholds",
    "class_auc": "AUC",
    "class_ap": "AP",
}
OPTIONS = ("method.options.", "method.learner_options.", "method.closing_options.")
Facts = dict[str, Any]
Federations = Mapping[str, Federation | str]  # by setting; a text instead says why its data could not be loaded


def load_federations(groups: Sequence[Group]) -> dict[str, Federation | str]:
    """Load the data of each setting once; where that fails, keep the reason instead."""
    found: dict[str, Federation | str] = {}
    for group in groups:
        key = setting(group)
        if key not in found:
            try:
                found[key] = group.run.federation
            except (FedncaError, OSError) as error:
                found[key] = str(error)
    return found


def page_facts(groups: Sequence[Group], federations: Federations) -> Facts:
    """Describe the groups and the settings they were trained in."""
    own = [group.settings for group in groups]
    apart = differing(own)
    places = list(federations)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version("fednca"),
        "finished": all(run.finished for group in groups for run in group.runs),
        "metrics": METRICS,
        "curved": CURVED,
        "by_class": BY_CLASS,
        "selections": SELECTIONS,
        "groups": [group_facts(group) | {"setting": places.index(setting(group))} for group in groups],
        "settings": [setting_facts(key, groups, federations[key]) for key in places],
        "shared": {path: show(value) for path, value in own[0].items() if path not in apart},
        "differing": {path: [show(each.get(path)) for each in own] for path in apart if not _is_methods(path)},
    }


def _is_methods(path: str) -> bool:
    """Return whether a setting belongs to the method, with which the page shows it."""
    return path.startswith(OPTIONS) or path in {"method.name", "method.learner", "method.closing"}


def group_facts(group: Group) -> Facts:
    """Describe one method: its settings, its curves as bands over seeds, and its results."""
    histories = [run.history for run in group.runs]
    records = [record for history in histories for record in history]
    judged = [record for record in records if "test" in record]
    terms = dict.fromkeys(term for record in records for term in record["losses"])
    config = group.run.config
    return {
        "label": group.label,
        "centralized": group.run.method.rule.centralized,
        "methods": [
            method_facts(name)
            for name in (config.method.name, config.method.learner, config.method.closing)
            if name not in {None, NONE}
        ],
        "options": {path: show(value) for path, value in group.settings.items() if path.startswith(OPTIONS)},
        "runs": [run_facts(run, history) for run, history in zip(group.runs, histories, strict=True)],
        "seconds": elapsed(histories),
        "curves": {
            f"{part}.{metric}": bands((record["round"], value_of(record, metric, part)) for record in judged)
            for part in ("val", "test")
            for metric in CURVED
        },
        "losses": {term: bands((record["round"], record["losses"].get(term)) for record in records) for term in terms},
        "clients": client_losses(records),
        "collapse": {
            name: bands((record["round"], record.get("collapse", {}).get(name)) for record in judged)
            for name in ("nc1", "nc2", "nc3")
        },
        "results": results_facts([run.results for run in group.runs]),
        "published": reported(config),
    }


def method_facts(name: str) -> Facts:
    """Describe a method by what its class says about itself."""
    found = find_method(name)
    about = found.about
    return {
        "name": name,
        "summary": about.summary,
        "formula": about.formula,
        "paper": about.paper,
        "changes": {"head": about.head, "objective": about.objective, "state": about.state, "rule": about.aggregation},
    }


def run_facts(run: Run, history: list[Line]) -> Facts:
    """Describe one run: its folder, progress, speed and machine."""
    begun = (run.folder / "environment.json").is_file()
    environment = run.environment if begun else {}
    on_gpu = environment.get("gpu") and not run.config.device.startswith("cpu")
    threads = run.config.threads or environment.get("threads")
    return {
        "folder": str(run.folder),
        "seed": run.config.seed,
        "finished": run.finished,
        "rounds": len(history),
        "of": run.config.train.rounds,
        "seconds": sum(record["seconds"] for record in history),
        "seconds_per_round": _median(record["seconds"] for record in history),
        "train_seconds": _median(record["train_seconds"] for record in history),
        "images_per_second": _median(record["samples_per_second"] for record in history),
        "device": environment["gpu"] if on_gpu else f"CPU, {threads or '?'} {'thread' if threads == 1 else 'threads'}",
        "engine": run.config.engine,
        "packages": environment.get("packages", {}) | {"python": environment.get("python", "")},
        "unreadable": len(environment.get("unreadable", [])),
    }


def bands(values: Iterable[tuple[int, float | None]]) -> Facts:
    """Return mean, lowest and highest value of each round, leaving out rounds without any.

    >>> bands([(1, 0.2), (1, 0.4), (2, None)])
    {'x': [1], 'mean': [0.3], 'low': [0.2], 'high': [0.4]}
    """
    by_round: dict[int, list[float]] = {}
    for number, value in values:
        if value is not None:
            by_round.setdefault(number, []).append(value)
    rounds = sorted(by_round)
    kinds: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "low": min, "high": max}
    return {"x": rounds} | {name: [_short(of(by_round[n])) for n in rounds] for name, of in kinds.items()}


def elapsed(histories: Sequence[list[Line]]) -> list[float]:
    """Return the seconds from the start to the end of each round, averaged over the seeds that reached it."""
    clocks = [np.cumsum([record["seconds"] for record in history]) for history in histories]
    longest = max(map(len, clocks), default=0)
    return [_short(statistics.fmean(clock[i] for clock in clocks if i < len(clock))) for i in range(longest)]


def client_losses(records: Sequence[Line]) -> dict[str, Facts]:
    """Return each client's total loss by round, averaged over seeds."""
    clients = sorted({int(client) for record in records for client in record["clients"]})
    found = {}
    for client in map(str, clients):
        own = [(record["round"], record["clients"].get(client)) for record in records]
        series = bands((number, sum(terms.values())) for number, terms in own if terms)
        found[client] = {"x": series["x"], "mean": series["mean"]}
    return found


def results_facts(results: Sequence[Mapping[str, Line]]) -> Facts:
    """Collect the results of all seeds for each way of choosing a round."""
    found: Facts = {}
    for way in SELECTIONS:
        own = [each[way] for each in results if way in each]
        if not own:
            continue
        calibrated = [each["calibrated"]["test"] for each in own if "calibrated" in each]
        by_class = {name: [each["test"][name] for each in own] for name in BY_CLASS if name != "calibrated_f1"}
        by_class["calibrated_f1"] = [each["class_f1"] for each in calibrated]
        found[way] = {
            "rounds": [each["round"] for each in own],
            "test": {name: spread_facts([each["test"][name] for each in own]) for name in METRICS},
            "calibrated": {name: spread_facts([each[name] for each in calibrated]) for name in CALIBRATED},
            "classes": {
                name: [spread_facts(values) for values in zip(*lists, strict=True)] for name, lists in by_class.items()
            },
        }
    return found


def spread_facts(values: Sequence[float | None]) -> Facts | None:
    """Return mean, sample standard deviation, lowest and highest of the known values, or None if there are none."""
    found = mean_and_std(values)
    if found is None:
        return None
    known = [value for value in values if value is not None]
    return {"mean": found[0], "std": found[1], "low": min(known), "high": max(known)}


def setting_facts(key: str, groups: Sequence[Group], federation: Federation | str) -> Facts:
    """Describe the data and the partition that some of the groups share."""
    config = next(group.run.config for group in groups if setting(group) == key)
    facts: Facts = {"dataset": config.data.name, "partition": config.partition.model_dump(mode="json")}
    facts |= {"image_size": config.data.image_size, "backbone": config.model.backbone, "rounds": config.train.rounds}
    if isinstance(federation, str):
        return facts | {"missing": federation, "classes": known_classes(groups, key)}
    counts = train_counts(federation)
    segments, names = group_tail(counts, readable(federation.dataset.classes), MOST_STACKED)
    facts |= {"stacked": {"names": names, "counts": segments.tolist()}, "counts": counts.tolist()}
    return facts | {"report": partition_report(federation), "classes": list(federation.dataset.classes)}


def known_classes(groups: Sequence[Group], key: str) -> list[str]:
    """Return the class names that the first started run has recorded."""
    runs = [run for group in groups if setting(group) == key for run in group.runs]
    begun = (run.environment["classes"] for run in runs if (run.folder / "environment.json").is_file())
    return list(next(begun, []))


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _short(value: float) -> float:
    """Keep six digits: enough for a curve, and the page stays small."""
    return float(f"{value:.6g}")

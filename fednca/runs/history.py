"""The rounds of a run: each one as a record and as a line of history.jsonl."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednca.base.errors import FedncaError
from fednca.base.files import write_atomic
from fednca.config import Config
from fednca.engines.contract import Judgement, Trained
from fednca.runs.folder import read_text

Line = dict[str, Any]  # a line of history.jsonl


@dataclass(frozen=True)
class Best:
    """The best round so far, by the validation metric."""

    round: int
    value: float


@dataclass(frozen=True)
class Round:
    """The record of a finished round; losses are means over the images trained on."""

    number: int
    losses: dict[str, float]
    clients: dict[str, dict[str, float]]  # losses by client
    took_part: list[str]
    train_seconds: float
    samples_per_second: float
    left_out: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # the engine's own entries
    judgement: Judgement = field(default_factory=Judgement)
    seconds: float = 0.0

    @classmethod
    def describe(
        cls,
        number: int,
        trained: list[Trained],
        names: list[str],
        left_out: dict[str, str],
        seconds: float,
        epochs: int,
    ) -> "Round":
        """Return the record of a round before its model is judged; `seconds` is the time of training."""
        samples = [each.update.samples for each in trained]
        terms = sorted({term for each in trained for term in each.losses})
        means = {
            term: sum(each.losses.get(term, 0.0) * n for each, n in zip(trained, samples, strict=True)) / sum(samples)
            for term in terms
        }
        return cls(
            number=number,
            losses=means,
            clients={str(each.update.client): each.losses for each in trained},
            took_part=[names[each.update.client] for each in trained],
            train_seconds=round(seconds, 3),
            samples_per_second=round(sum(samples) * epochs / max(seconds, 1e-9), 1),
            left_out=left_out,
            notes={names[each.update.client]: each.note for each in trained if each.note},
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics on `val` and `test`, at thresholds of 0.5 and `calibrated`; empty if the model was not judged."""
        return self.judgement.metrics

    def line(self) -> Line:
        """Return the round as a line of history.jsonl."""
        found: Line = {
            "round": self.number,
            "losses": self.losses,
            "clients": self.clients,
            "train_seconds": self.train_seconds,
            "samples_per_second": self.samples_per_second,
        }
        if self.left_out or self.notes or self.took_part != list(self.clients):  # the last: sites, which have names
            found |= {"took_part": self.took_part, "left_out": self.left_out, "notes": self.notes}
        found |= self.facts
        if self.judgement.left_out:
            found["not_judged_by"] = self.judgement.left_out
        return found | self.metrics | {"seconds": self.seconds}


def better(best: Best | None, record: Round, config: Config) -> Best:
    """Return the better of the best round so far and a judged one; of equals, the later one."""
    value = value_of(record.metrics, "val", config)
    return Best(record.number, value) if best is None or value >= best.value else best


def select_rounds(history: list[Line], config: Config) -> dict[str, Line]:
    """Choose a round in three ways: best validation, best test (the paper's code), last."""
    judged = [record for record in history if "test" in record]
    if not judged:
        return {}
    chosen = {
        "val": max(judged, key=lambda record: (value_of(record, "val", config), record["round"])),
        "paper": max(judged, key=lambda record: (value_of(record, "test", config), record["round"])),
        "last": judged[-1],
    }
    return {name: {key: record[key] for key in ("round", "val", "test")} for name, record in chosen.items()}


def final_results(history: list[Line], config: Config, facts: dict[str, Any]) -> dict[str, Line]:
    """Return the results of a finished run, with those at calibrated thresholds, by site, and the engine's entries."""
    results = select_rounds(history, config)
    for chosen in results.values():
        record = history[chosen["round"] - 1]
        chosen |= {key: record[key] for key in ("calibrated", "by_site") if key in record} | facts
    return results


def value_of(metrics: dict[str, Any], part: str, config: Config) -> float:
    """Return the metric by which rounds are chosen, or -infinity if it is not defined."""
    value = metrics[part][config.evaluate.select]
    return float("-inf") if value is None else float(value)


def truncate_history(path: Path, rounds: int) -> None:
    """Cut the history to its first `rounds` lines; later or half-written ones belong to no checkpoint."""
    records = read_history(path, rounds)
    if len(records) < rounds:
        raise FedncaError(f"'{path}' has {len(records)} rounds where the last checkpoint has {rounds}")
    write_atomic(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())


def read_history(path: Path, rounds: int | None = None) -> list[Line]:
    """Read the complete lines of a history, or the first `rounds` of them; check that they are rounds 1, 2, …"""
    text = read_text(path) if path.exists() else ""
    records = []
    for number, line in enumerate(text.split("\n")[:-1][:rounds], start=1):
        try:
            record = json.loads(line)
            sound = record["round"] == number
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise FedncaError(f"'{path}' is damaged in line {number}")
        records.append(record)
    return records

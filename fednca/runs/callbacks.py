"""Callbacks, which a run calls while it goes on; progress views and loggers are callbacks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednca.data.federation import Federation
    from fednca.runs.history import Best, Round
    from fednca.runs.run import Run


class Callback:
    """Override the methods you need; a callback does not change the run."""

    def on_prepare(self, what: str, done: int, total: int) -> None:
        """Called while images are prepared, for example decoded: `done` of `total` are ready."""

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Called before the first round; `rounds_done` is above 0 in a resumed run."""

    def on_note(self, text: str) -> None:
        """Called with one sentence on how the run is executed, what its data lack, or why it ends early."""

    def on_client(self, number: int, client: int, losses: dict[str, float]) -> None:
        """Called after each client's local update in round `number`, with its mean losses by term."""

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Called after each round with its record, and with the best round so far."""

    def on_end(self, run: "Run") -> None:
        """Called at the end, whether all rounds are done or the run stopped early."""

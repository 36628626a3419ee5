"""What can be told of a run while it goes on; progress views and loggers hang on this."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednca.data.federation import Federation
    from fednca.runs.history import Best, Round
    from fednca.runs.run import Run


class Callback:
    """Override what you want to hear of; nothing a callback does changes the run."""

    def on_prepare(self, what: str, done: int, total: int) -> None:
        """Hear how many images have been decoded, where that is still to be done."""

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Hear of the federation before the first round (`rounds_done` > 0 after a resume)."""

    def on_note(self, text: str) -> None:
        """Hear, in a sentence, how the run is executed or what its data lack, before the first round."""

    def on_client(self, number: int, client: int, losses: dict[str, float]) -> None:
        """Hear of a client's local update in round `number`."""

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Hear of a finished round: what is known of it, and the best round so far."""

    def on_end(self, run: "Run") -> None:
        """Hear of the end, whether all rounds are done or the run stopped."""

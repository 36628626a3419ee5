"""Watching a run on a terminal: what is drawn ends, however the run does."""

from io import StringIO

import pytest
from rich.console import Console

from fednca.base.errors import FedncaError
from fednca.cli.progress import watching

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize("error", [KeyboardInterrupt, FedncaError])
def test_the_cursor_comes_back_where_decoding_stops_halfway(error):
    screen = StringIO()

    def decode():
        with watching(Console(file=screen, force_terminal=True)) as view:
            view.on_prepare("digits train", 16, 100)
            raise error

    with pytest.raises(error):
        decode()
    shown = screen.getvalue()
    assert HIDE in shown
    assert shown.rindex(SHOW) > shown.rindex(HIDE)

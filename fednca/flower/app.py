"""The Flower app: `flwr run` starts `server` at the SuperLink, and `client` at every SuperNode."""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fednca.base.errors import FedncaError
from fednca.base.files import explain_write
from fednca.flower.client import announce, close, evaluate, train
from fednca.flower.config import load_server
from fednca.flower.server import serve


def template(name: str) -> str:
    """Return the text of a file that `fednca flower init` writes, with fields to fill."""
    return (Path(__file__).parent / "bundle" / name).read_text(encoding="utf-8")


def without_traceback(record: logging.LogRecord) -> bool:
    """Shorten what Flower logs of a mistake that a user can mend to its one sentence."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedncaError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True


def run(grid: Grid, context: Context) -> None:
    """Serve the run that the run config's `server` describes; `resume=true` goes on with it."""
    logging.getLogger("flwr").addFilter(without_traceback)
    again = context.run_config["resume"]
    if not isinstance(again, bool):
        raise FedncaError(f"resume is true or false, without quotes; found '{again}'")
    serve(grid, load_server(Path(str(context.run_config["server"]))), resume=again)


def write_app(folder: Path) -> Path:
    """Copy what `flwr run` needs into a folder and return it."""
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(template("pyproject.toml"), encoding="utf-8")
    return folder


server = ServerApp()
server.main()(run)

client = ClientApp()
client.query()(announce)
client.query("close")(close)
client.train()(train)
client.evaluate()(evaluate)

"""The Flower app: `flwr run` starts `server` at the SuperLink, and `client` at every SuperNode."""

from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fednca.errors import FedncaError
from fednca.files import explain_write
from fednca.flower.client import announce, close, evaluate, train
from fednca.flower.config import load_server
from fednca.flower.server import serve

BUNDLE = Path(__file__).parent / "bundle"


def run(grid: Grid, context: Context) -> None:
    """Serve the run that the run config's `server` describes; `resume=true` goes on with it."""
    again = context.run_config["resume"]
    if not isinstance(again, bool):
        raise FedncaError(f"resume is true or false, without quotes; found '{again}'")
    serve(grid, load_server(Path(str(context.run_config["server"]))), resume=again)


def write_app(folder: Path) -> Path:
    """Copy what `flwr run` needs into a folder and return it."""
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_bytes((BUNDLE / "pyproject.toml").read_bytes())
    return folder


server = ServerApp()
server.main()(run)

client = ClientApp()
client.query()(announce)
client.query("close")(close)
client.train()(train)
client.evaluate()(evaluate)

"""Flower's simulation: ClientApp, ServerApp and FedAvg on Ray, with one core per client and as many clients as cores.

It is started by the older `run_simulation`: `flwr run` starts the same simulation behind two more processes and takes
longer. A worker loads a client's images and builds the model once, and keeps both.
"""

import tempfile
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers import parcel
from peers.work import Outcome, Work, train_locally

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client from the weights in the message."""
    settings, client = message.content["config"], int(context.node_config["partition-id"])
    config, method, model, _ = parcel.load_parts(settings["folder"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_locally(
        model, method, parcel.load_client(settings["folder"], client), config, settings["server-round"], client
    )
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}  # equal weights
    return Message(RecordDict(content), reply_to=message)


def run(work: Work, cores: int) -> Outcome:
    """Train with Flower; the clock stops when the last round is averaged, before Ray shuts down."""
    server_app, done, clients = ServerApp(), [], len(work.shards)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0, min_train_nodes=clients, min_available_nodes=clients)
        result = strategy.start(
            grid,
            ArrayRecord(work.initial),
            num_rounds=work.config.train.rounds,
            train_config=ConfigRecord({"folder": folder}),
        )
        done.append((time.perf_counter(), result.arrays.to_torch_state_dict()))

    with tempfile.TemporaryDirectory() as folder:
        parcel.save(work, Path(folder))
        resources = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        began = time.perf_counter()
        run_simulation(server_app, client_app, clients, backend_config=resources)
    ended, weights = done[0]
    return Outcome(ended - began, weights)

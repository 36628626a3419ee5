"""pfl-research's simulation: its FederatedAveraging, SimulatedBackend and PyTorchModel, in one process or several.

Two things differ from pfl as it comes. Buffers are averaged like weights, while pfl keeps the BatchNorm statistics of
the last client. And clients are not evaluated in the first round, since no other row does that.
"""

import time
from collections.abc import Callable, Iterator

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from peers.work import Outcome, Work, clip_norm_of, copy_of, epochs, loss_of, ordinary_optimizer


class ClientData(Dataset):
    """A client's batches of one round, epoch by epoch."""

    def __init__(self, work: Work, client: int, number: int) -> None:
        super().__init__((work.shards[client].labels,), user_id=client)
        self.epochs = epochs(work.shards[client], work.config, number, client)

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the next epoch."""
        return next(self.epochs)


class CountRounds(TrainingProcessCallback):
    """Count the rounds, so that clients know the current one."""

    number = 1

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
        self.number = central_iteration + 2
        return False, Metrics()


class ModelWithBuffers(PyTorchModel):
    """A model whose floating-point buffers are sent and averaged with its weights."""

    def __init__(self, work: Work, create_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        buffers = {name: each for name, each in work.model.named_buffers() if each.is_floating_point()}
        trainable = {name: each for name, each in work.model.named_parameters() if each.requires_grad}
        travelling = trainable | {name: each for name, each in buffers.items() if name in work.initial}
        super().__init__(work.model, create_optimizer, torch.optim.SGD(travelling.values(), lr=1.0))
        self._variable_map = travelling

    def evaluate(self, *_: object, **__: object) -> Metrics:
        """Evaluate nothing."""
        return Metrics()


def run(work: Work, began: float | None = None) -> Outcome:
    """Train with pfl; a worker, by pfl's environment variables, trains its share of each round's clients."""
    config, method, model = work.config, work.method, work.model
    began = began or time.perf_counter()
    model.load_state_dict(work.initial)
    model.train()
    model.loss = lambda images, labels: loss_of(method, model, images, labels, config)
    model.metrics = lambda *_: {}

    def create_optimizer(_: Iterator[Tensor], lr: float) -> torch.optim.Optimizer:
        return ordinary_optimizer(trainable, config, method)

    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    rounds = CountRounds()
    clients = range(len(work.shards))
    data = FederatedDataset(
        lambda client: ClientData(work, client, rounds.number),
        MinimizeReuseUserSampler(clients),
        user_id_to_weight={client: len(work.shards[client]) for client in clients},
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=config.train.rounds,
            evaluation_frequency=config.train.rounds,
            train_cohort_size=len(clients),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=ModelWithBuffers(work, create_optimizer),
        model_train_params=NNTrainHyperParams(
            local_batch_size=config.train.batch_size,
            local_num_epochs=config.train.local_epochs,
            local_learning_rate=config.train.lr,
            local_max_grad_norm=clip_norm_of(config, method),
        ),
        callbacks=[rounds],
    )
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    return Outcome(time.perf_counter() - began, copy_of(model))

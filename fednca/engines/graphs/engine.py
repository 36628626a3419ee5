"""The engine for a GPU: each client's step is replayed as a CUDA graph, and the clients of a round train side by side.

While a stream is *captured*, the kernels that PyTorch calls are recorded with their arguments instead of run.
*Replaying* the graph launches all of them at once, without any Python. The step of a small network is hundreds of short
kernels, and launching them one by one from Python takes longer than running them. Graphs bring four rules, which
explain most of the code here and in `slots`, `lanes` and `passes`:

- Addresses are fixed. A graph reads and writes the memory it was captured with. So a client trains in a slot whose
  tensors never move, and its weights and data are copied in.
- Python does not run again. A step cannot look at a value or branch on one. So the position of a batch is counted on
  the GPU, each batch size has a graph of its own, and what losses draw is drawn before the first step.
- A capture may not wait for the GPU, and nothing may happen in it for the first time. So everything is tried out once
  before: kernels are compiled and caches filled.
- The kernels of one stream run one after another. So each slot has a stream, and the GPU works on several clients at
  once.

On a CPU the same steps run directly, one client after another; tests compare them with the eager engine.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fednca.base.errors import UnfitEngineError
from fednca.base.randomness import derive_seed, seeded, torch_rng
from fednca.base.tensors import Packed
from fednca.engines.augment import draw
from fednca.engines.contract import Trained
from fednca.engines.graphs.lanes import Lane
from fednca.engines.graphs.passes import Passes
from fednca.engines.graphs.slots import Common, Feed, Slot, copy_all
from fednca.engines.images import Shard, batch_bounds
from fednca.engines.local import LocalEngine, Workplace
from fednca.engines.local_update import finish_batch
from fednca.engines.scoring import autocast
from fednca.methods.contract import Local, Server, Tensors, Update

HEADROOM = 0.9  # share of the free memory that slots may take
FINISH, CLOSE = "finish", "close"  # names of what is captured beside steps
END = object()


@dataclass
class Turn:
    """A client's update in a round: what it sees, what it starts from, and where its outcome goes.

    The outcome is copied here as soon as the last step is done, since the next client then trains in the same slot.
    """

    client: int
    feed: Feed
    state: Tensors
    rng: torch.Generator  # of the losses; what the steps draw has been taken from it already
    weights: Packed
    totals: Tensor


class GraphEngine(LocalEngine):
    """Trains clients in slots, one stream each; without a GPU the same steps are done one after the other."""

    def __init__(
        self, place: Workplace, wanted: int, *, judged_at_once: int | None = None, states_on_device: bool = True
    ) -> None:
        """Try a step out and plan the memory for `wanted` clients side by side; states may wait on the host.

        Where it is known how many images are judged at once, memory for that is taken before slots take theirs.
        """
        super().__init__(place)
        self.method, self.shards = place.method, place.train
        self.config, self.seed = place.config.train, place.config.seed
        self.states_on_device = states_on_device
        # All weights lie in one vector, by name; one weight of two names would need to be in two places.
        if len(list(place.model.parameters())) < len(list(place.model.named_parameters(remove_duplicate=False))):
            raise UnfitEngineError("layers of the model share a weight")
        longest = max(self.shards, key=len)
        self.classes = longest.labels.shape[1]
        self.common = Common(
            self.method,
            place.model,
            self.config,
            longest.store,
            room=len(longest) * self.config.local_epochs,
            clients=len(self.shards),
        )
        self.device = self.common.device
        self.slots: list[tuple[Slot, Lane]] = []
        self.asked: dict[Hashable, Tensors] = {}  # where an exchange of the closing reads what the server asks
        largest = max(size for shard in self.shards for size in sizes_of(shard, self.config.batch_size))
        # What is made once (caches, room to judge in, graphs of whole passes) comes before `_plan`, which measures
        # what is left and fills it with slots.
        self.common.try_out(*next(longest.batches(largest)))
        passed_over = [place.val, place.test, *(self.shards if self.method.closing or self.method.rule.adds_up else [])]
        self.passes = Passes(self.common, self.classes, max(map(len, passed_over), default=0))
        if judged_at_once and self.device.type == "cuda":
            for shard in (place.val, place.test):
                self.predict(self.common.start, shard, judged_at_once)
        if self.method.rule.adds_up:
            self._prepare_finish(longest)
        fitting = self._plan(wanted, largest)
        self.note = f"engine: CUDA graphs, {fitting} clients at once"
        if fitting < wanted:
            self.note += f" (of {wanted} in a round: the GPU's memory has no room for more)"
        if FINISH in self.passes.uncaptured:
            self.note += "; what follows a client's last step is done without"

    def _prepare_finish(self, longest: Shard) -> None:
        """Capture what is done after a client's last step, so that it takes its memory before slots take theirs."""
        self.seen = self.common.local(self.common.model)
        vars(self.seen).update(global_model=self.common.frozen.model)  # Local would make a copy
        tell = partial(self._finish_sums, self.seen)
        self.passes.prepare(FINISH, longest, tell)
        if self.seen.shapes:  # it draws on the host, which a replay would not do again
            self.passes.uncaptured.add(FINISH)
        elif self.device.type == "cuda":
            self.passes.add_up(FINISH, longest, finish_batch(self.device), tell)

    def _plan(self, wanted: int, largest: int) -> int:
        """Build as many slots as are wanted and fit into memory, and return how many they are.

        The first slot shows what one costs: its tensors, and what the graph of its largest step needs to run.
        """
        before = free_memory(self.device)
        while len(self.slots) < wanted:
            slot, lane = Slot(self.common, self.classes), Lane(self.device)
            self.slots.append((slot, lane))
            if self.device.type != "cuda":
                continue
            lane.do(largest, partial(slot.step, largest))
            if len(self.slots) == 1:
                left = free_memory(self.device)
                # Every client's weights are kept until the server has averaged them.
                results = wanted * sum(v.numel() * v.element_size() for v in slot.values.vectors.values())
                wanted = min(wanted, 1 + max(0, int((HEADROOM * left - results) // max(1, before - left))))
        return wanted

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained]:
        """Yield the result of each client in round `number`."""
        self.common.begin(server)
        if self.device.type == "cuda":
            yield from self._train_side_by_side(number, clients, states)
            return
        for client in clients:
            with seeded(self.seed, "dropout", number, client):
                turn = self._task(number, client, states)
                for _ in self._steps(*self.slots[0], turn):
                    pass
                yield self._result(number, turn)

    def _train_side_by_side(self, number: int, clients: Sequence[int], states: dict[int, Tensors]) -> Iterator[Trained]:
        """Let all slots train at once, and yield the results as clients finish.

        One Python thread feeds all streams. It launches one step per slot in turn: if it launched a client's whole
        round first, the other streams would have nothing to do meanwhile. A launch does not wait for the GPU, which
        works through the queue of each stream on its own.
        """
        main = torch.cuda.current_stream(self.device)
        done: deque[tuple[Turn, torch.cuda.Event]] = deque()

        def work_off(slot: Slot, lane: Lane, queue: list[int]) -> Iterator[None]:
            for client in queue:
                # Torch reuses memory by the stream it was allocated on. A turn outlives the lane's work: main it is.
                with torch.cuda.stream(main):
                    turn = self._task(number, client, states)
                lane.stream.wait_stream(main)  # on the GPU; Python goes on
                # Replays draw dropout from this generator.
                lane.rng.manual_seed(derive_seed(self.seed, "dropout", number, client))
                yield from self._steps(slot, lane, turn)
                done.append((turn, lane.stream.record_event()))  # passed when the GPU is done with it, not Python

        steps = {client: len(sizes_of(self.shards[client], self.config.batch_size)) for client in clients}
        queues = spread(steps, len(self.slots))
        working = {lane: work_off(slot, lane, queue) for (slot, lane), queue in zip(self.slots, queues, strict=True)}
        while working:
            take_turns(working, main)
            # What a method does after a client's last step goes beside the steps of clients that have more of them.
            while done and done[0][1].query():  # type: ignore[no-untyped-call]
                yield self._result(number, done.popleft()[0])
        for turn, event in done:
            event.synchronize()
            yield self._result(number, turn)

    def _task(self, number: int, client: int, states: dict[int, Tensors]) -> Turn:
        """Draw everything that a client's update draws, and bring it to the device.

        Each purpose has its own generator, so drawing all of it in advance gives the same numbers as the eager engine,
        which draws step by step.
        """
        shard, epochs = self.shards[client], self.config.local_epochs
        order, losses, changes = (
            torch_rng(self.seed, what, number, client) for what in ("batches", "losses", "augment")
        )
        picked = torch.cat([torch.randperm(len(shard), generator=order) for _ in range(epochs)])
        sizes = sizes_of(shard, self.config.batch_size) * epochs
        draws = [[torch.rand(size, *shape, generator=losses) for shape in self.common.drawn] for size in sizes]
        augmented = [draw(size, changes) for size in sizes] if self.slots[0][0].feed.changes else []
        picked = self._upload(picked)
        feed = Feed(
            rows=shard.rows[picked],
            labels=shard.labels[picked],
            draws=[self._upload(torch.cat(each)) for each in zip(*draws, strict=True)],
            changes=[self._upload(torch.cat(augmented))] if augmented else [],
            sizes=sizes,
        )
        totals = torch.empty_like(self.slots[0][0].totals)
        weights = Packed.zeros(self.common.layout, self.device)
        return Turn(client, feed, states.get(client, {}), losses, weights, totals)

    def _upload(self, tensor: Tensor) -> Tensor:
        """Bring a tensor to the device without waiting for it, which only works from pinned memory."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _steps(self, slot: Slot, lane: Lane, turn: Turn) -> Iterator[None]:
        """Do a turn in a slot, yielding after each step so that the other slots get theirs."""
        slot.begin(turn.feed, turn.state)
        if self.method.rule.centralized and turn.state:
            slot.optimizer.load(turn.state)
        for size in turn.feed.sizes:
            lane.do(size, partial(slot.step, size))
            yield
        # On the lane's stream, and so after the last step and before the slot's next client.
        turn.weights.load(slot.values)
        turn.totals.copy_(slot.totals)
        if self.method.rule.centralized:
            turn.state = slot.optimizer.dump()

    def _result(self, number: int, turn: Turn) -> Trained:
        """Let the method finish a client's update, whose last step is done."""
        shard, config = self.shards[turn.client], self.config
        self.common.scratch.load(turn.weights)
        local = Local(
            client=turn.client,
            round=number,
            lr=config.lr,
            learner=self.method.learner,
            model=self.common.model,
            start=self.common.start,
            received=self.common.received,
            state={name: tensor.to(self.device) for name, tensor in (turn.state or self.common.state).items()},
            rng=turn.rng,
            steps=len(turn.feed.sizes),
            samples=len(shard),
        )
        vars(local).update(global_model=self.common.frozen.model)  # Local would make a copy
        extra = self._finish(local, shard)
        if not self.states_on_device:
            local.state = {name: tensor.cpu() for name, tensor in local.state.items()}
        update = Update(turn.client, turn.weights, extra, len(shard), local.steps)
        seen = len(shard) * config.local_epochs
        means = [total / seen for total in turn.totals.tolist()]
        return Trained(update, local.state, dict(zip(self.common.terms, means, strict=True)))

    def _finish(self, local: Local, shard: Shard) -> Tensors:
        """Do what the eager engine does after a client's last step, going through its images by graphs."""
        if not self.method.rule.adds_up:
            return self.method.rule.finish(local, {})
        seen = local
        if FINISH not in self.passes.uncaptured:  # the graph reads the state where it was captured: copy it there
            seen = self.seen
            copy_all(local.state, seen.state)
        tell = partial(self._finish_sums, seen)
        return self.method.rule.finish(local, self.passes.add_up(FINISH, shard, finish_batch(self.device), tell))

    def _finish_sums(self, local: Local, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of the sums that `finish` is given."""
        with autocast(self.device, self.config):
            return self.method.rule.sums(local, images, labels)

    @torch.no_grad()
    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives a shard's images."""
        self.passes.load(weights)
        return self.passes.score(shard, batch_size)

    @torch.no_grad()
    def client_sums(self, weights: Tensors, shards: Sequence[Shard], batch_size: int, asked: Tensors) -> list[Tensors]:
        """Return each client's sums for an exchange of the closing, of a model with these weights."""
        self.passes.load(weights)
        key = (CLOSE, *((name, tensor.shape, tensor.dtype) for name, tensor in asked.items()))
        if key not in self.asked:
            self.asked[key] = {name: tensor.clone() for name, tensor in asked.items()}
            self.passes.prepare(key, shards[0], partial(self._closing_sums, self.asked[key]))
        copy_all(asked, self.asked[key])  # a graph reads where it did when it was captured
        add = partial(self._closing_sums, self.asked[key])
        return [self.passes.add_up(key, shard, batch_size, add) for shard in shards]

    def _closing_sums(self, asked: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of a client's sums for an exchange of the closing."""
        assert self.method.closing is not None
        with autocast(self.device, self.config):
            return self.method.closing.sums(self.passes.frozen.model, images, labels, asked)

    def close(self) -> None:
        """Drop graphs and slots, so that their memory is free for other runs."""
        for _, lane in self.slots:
            lane.close()
        self.passes.lane.close()
        self.slots.clear()


def take_turns(working: dict[Lane, Iterator[None]], main: torch.cuda.Stream) -> None:
    """Let every lane's work launch its next step on the lane's stream, and forget the work that has ended."""
    try:
        for lane, work in list(working.items()):
            torch.cuda.set_stream(lane.stream)  # the context manager for it costs as much as a launch
            if next(work, END) is END:
                del working[lane]
    finally:
        torch.cuda.set_stream(main)


def sizes_of(shard: Shard, batch_size: int) -> list[int]:
    """Return the sizes of a shard's batches."""
    return [stop - start for start, stop in batch_bounds(len(shard), batch_size)]


def spread(steps: dict[int, int], slots: int) -> list[list[int]]:
    """Spread clients over slots, the one with most steps first and each to the slot that has least to do.

    >>> spread({0: 5, 1: 9, 2: 4}, 2)
    [[1], [0, 2]]
    """
    queues: list[list[int]] = [[] for _ in range(slots)]
    for client in sorted(steps, key=lambda client: -steps[client]):
        min(queues, key=lambda queue: sum(steps[other] for other in queue)).append(client)
    return queues


def free_memory(device: torch.device) -> int:
    """Return how many bytes the device has left, or nothing where that is not counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what torch keeps for later counts as taken
    return torch.cuda.mem_get_info(device)[0]

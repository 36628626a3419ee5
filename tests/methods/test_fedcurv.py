"""FedCurv's Fisher against a loop over samples, its penalty against the explicit sum over clients."""

import threading

import pytest
import torch
from fisher_cases import by_a_loop, fisher_diagonal, trained_weights
from helpers import LeastSquares, local_of, small_model, tiny
from torch import nn

import fednca.measures.fisher
from fednca.measures.fisher import layers_suffice, plain_attention, squares_of_convolution
from fednca.methods.contract import Server, Update
from fednca.methods.fedavg import LinearLearner
from fednca.methods.fedcurv import OthersCurvature
from fednca.methods.fednca_ml import FedNCAMLLearner
from fednca.models import Classifier, Output
from fednca.runs import train


def test_fisher_of_two_points_by_hand():
    # w = 2. The point (1, 1) has the gradient x·(w·x - y) = 1, the point (2, 1) has 2·(4 - 1) = 6: (1 + 36)/2.
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    points = torch.tensor([[1.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    fisher = fisher_diagonal(LeastSquares(), model, [(torch.zeros(2, 3, 1, 1), points)])
    assert float(fisher["weight"]) == 18.5


LEARNERS = [
    LinearLearner(),
    FedNCAMLLearner().decided(pretrained=False),
    FedNCAMLLearner(queries="learnable", lambda2=0.5).decided(pretrained=False),
    FedNCAMLLearner(variant="released").decided(pretrained=False),
]


@pytest.mark.parametrize("learner", LEARNERS, ids=["fedavg", "paper", "queries", "released"])
def test_fisher_is_the_mean_over_samples_of_squared_gradients(learner, monkeypatch):
    monkeypatch.setattr(fednca.measures.fisher, "MOST", 4)  # batches of 6 and 3: chunks of 4, 2 and 3
    model = small_model(learner, "abcde").double()
    images = torch.randn(9, 3, 16, 16, dtype=torch.float64)
    labels = (torch.rand(9, 5) < 0.4).double()
    labels[2, 1] = -1  # unknown
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.rand_like(weight) / 10)  # some scales start at 0 and would hide all behind them
    model(images)  # running statistics unlike a batch's own
    next(model.parameters()).requires_grad_(False)

    assert layers_suffice(model, trained_weights(model)) == isinstance(learner, LinearLearner)
    fisher = fisher_diagonal(learner, model, [(images[:6], labels[:6]), (images[6:], labels[6:])])

    torch.testing.assert_close(fisher, by_a_loop(learner, model, images, labels), rtol=1e-9, atol=1e-14)
    assert all(bool((each > 0).any()) for each in fisher.values())


@pytest.mark.parametrize(
    "shape",
    [
        {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 3), "dilation": (2, 1)},
        {"kernel_size": 1, "stride": 2, "bias": False},
        {"kernel_size": 7, "stride": 2, "padding": 3, "padding_mode": "zeros"},
    ],
)
def test_fisher_of_convolutions_of_all_shapes(shape):
    torch.manual_seed(0)
    learner = LinearLearner()
    model = Classifier(nn.Conv2d(3, 4, **shape), learner.build_head(("a", "b"), 4)).double()
    images, labels = torch.randn(4, 3, 13, 10, dtype=torch.float64), torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    assert layers_suffice(model, trained_weights(model))
    fisher = fisher_diagonal(learner, model, [(images.to(memory_format=torch.channels_last), labels)])
    torch.testing.assert_close(fisher, by_a_loop(learner, model, images, labels), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("trained", ["all", "the last convolution and the head", "the head"])
def test_fisher_of_a_network_that_is_trained_in_part(trained):
    torch.manual_seed(0)
    learner = LinearLearner()
    first, last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, bias=False)
    backbone = nn.Sequential(first, nn.ReLU(inplace=True), last, nn.ReLU(inplace=True))  # each overwrites an output
    model = Classifier(backbone, learner.build_head(("a", "b"), 6)).double()
    first.requires_grad_(trained == "all")
    last.requires_grad_(trained != "the head")
    images, labels = torch.randn(4, 3, 7, 6, dtype=torch.float64), torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    fisher = fisher_diagonal(learner, model, [(images, labels)])
    expected = by_a_loop(learner, model, images, labels)
    assert len(fisher) == {"all": 5, "the last convolution and the head": 3, "the head": 2}[trained]
    torch.testing.assert_close(fisher, expected, rtol=1e-9, atol=1e-14)


class Twice(nn.Module):
    """A backbone that uses its only layer twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, images):
        return self.layer(self.layer(images))


def test_fisher_of_a_layer_that_is_used_twice():
    torch.manual_seed(0)
    learner = LinearLearner()
    model = Classifier(Twice(), learner.build_head(("a", "b"), 3)).double()
    images, labels = torch.randn(4, 3, 5, 5, dtype=torch.float64), torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    fisher = fisher_diagonal(learner, model, [(images, labels)])
    torch.testing.assert_close(fisher, by_a_loop(learner, model, images, labels), rtol=1e-9, atol=1e-14)


def test_squares_of_a_convolution_in_bf16_are_near_and_added_up_in_float32():
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 20, 3, padding=2, dilation=2)
    x, δ = torch.randn(3, 5, 13, 10).bfloat16(), torch.randn(3, 20, 13, 10).bfloat16()
    found = squares_of_convolution(layer, x, δ)
    expected = {name: torch.zeros_like(weight) for name, weight in layer.double().named_parameters()}
    for one, δ_of_one in zip(x.double(), δ.double(), strict=True):
        gradients = torch.autograd.grad(layer(one[None]), layer.parameters(), δ_of_one[None])
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient**2
    for name, reference in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), reference, rtol=0.02, atol=0.02 * float(reference.mean()))


class TokenHead(nn.Module):
    """A linear layer on every position of the map, of which each class takes the best."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, feature_map):
        tokens = feature_map.flatten(2).transpose(1, 2)
        return Output(self.linear(tokens).amax(dim=1), None, tokens.mean(dim=1))


def test_fisher_of_a_linear_layer_on_several_tokens():
    torch.manual_seed(0)
    learner = LinearLearner()
    model = Classifier(nn.Conv2d(3, 4, 3), TokenHead()).double()
    images, labels = torch.randn(4, 3, 7, 6, dtype=torch.float64), torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    assert layers_suffice(model, trained_weights(model))
    fisher = fisher_diagonal(learner, model, [(images, labels)])
    torch.testing.assert_close(fisher, by_a_loop(learner, model, images, labels), rtol=1e-9, atol=1e-14)


def test_the_penalty_is_the_sum_over_the_other_clients_up_to_a_constant():
    torch.manual_seed(0)
    clients, me = 4, 2
    model = nn.Linear(3, 2).double()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    u = [{name: torch.rand(shape).double() for name, shape in shapes.items()} for _ in range(clients)]
    w = [{name: torch.randn(shape).double() for name, shape in shapes.items()} for _ in range(clients)]
    uploads = [
        {f"u/{name}": u[k][name] for name in shapes} | {f"v/{name}": u[k][name] * w[k][name] for name in shapes}
        for k in range(clients)
    ]
    rule = OthersCurvature(lam=0.7)
    server = Server(w[0], rule.start_server(dict(model.named_parameters()), clients))
    for k in (3, 0, 2, 1):  # one client per round
        server = rule.combine(server, [Update(k, w[k], uploads[k], samples=1, steps=1)], [1.0], clients)
    local = local_of(model, LinearLearner(), received=rule.send(server), state=uploads[me])

    def explicit():
        return 0.7 * sum(
            (u[j][name] * (weight - w[j][name]) ** 2).sum()
            for j in range(clients)
            if j != me
            for name, weight in model.named_parameters()
        )

    gaps = []
    for _ in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_()
        found, expected = rule.penalties(local)["curv"], explicit()
        gaps.append(float((expected - found).detach()))
        for one, other in zip(*(torch.autograd.grad(f, model.parameters()) for f in (found, expected)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    constant = 0.7 * sum(float((u[j][n] * w[j][n] ** 2).sum()) for j in range(clients) if j != me for n in shapes)
    assert gaps == pytest.approx([constant] * 3)


def test_without_lambda_and_in_the_first_round_it_is_fedavg_to_the_last_bit(tmp_path):
    def weights(name, rounds, **options):
        run = train(
            tiny(method__name=name, method__options=options, train__rounds=rounds), tmp_path / f"{name}{rounds}"
        )
        return run.state("last").server.weights

    torch.testing.assert_close(weights("fedcurv", 2, lam=0.0), weights("fedavg", 2), rtol=0, atol=0)
    torch.testing.assert_close(weights("fedcurv", 1, lam=100.0), weights("fedavg", 1), rtol=0, atol=0)


@pytest.mark.parametrize("learner", ["fednca-ml", "fedlgt"])  # the second draws at random and has an encoder
def test_with_sampled_clients_the_server_keeps_what_each_sent_last(learner, tmp_path):
    options = {"method__name": "fedcurv", "method__learner": learner, "train__local_epochs": 1}
    run = train(tiny(**options, train__participation=0.4, train__rounds=3), tmp_path / "run")  # one client a round
    took_part = {int(k) for record in run.history for k in record["clients"]}
    assert 1 < len(took_part)
    state = run.state("last")
    assert set(state.clients) == took_part
    for k in range(3):
        for name, kept in state.server.state.items():
            if name.startswith(f"{k}/"):
                own = state.clients[k][name.removeprefix(f"{k}/")] if k in took_part else torch.zeros_like(kept)
                assert torch.equal(kept, own)
    (last,) = map(int, run.history[-1]["clients"])
    for name, weight in run.model("last").named_parameters():  # the only client of the round: its weights are global
        torch.testing.assert_close(state.clients[last][f"v/{name}"], state.clients[last][f"u/{name}"] * weight.detach())
    uploaded = sum(tensor.numel() for tensor in state.clients[last].values())
    assert uploaded == OthersCurvature.copies * sum(p.numel() for p in run.model("last").parameters())


def test_runs_at_once_leave_the_switches_of_attention_as_they_were():
    def switches():
        backends = torch.backends
        return backends.mha.get_fastpath_enabled(), backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()

    before, entered, leave = switches(), [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def work(run):
        with plain_attention():
            entered[run].set()
            leave[run].wait()

    threads = [threading.Thread(target=work, args=[run]) for run in range(2)]
    for run, thread in enumerate(threads):
        thread.start()
        entered[run].wait(timeout=0.5)  # the second one waits for the first to leave
    for event, thread in zip(leave, threads, strict=True):
        event.set()
        thread.join()
    assert all(event.is_set() for event in entered)
    assert switches() == before == (True, True, True)


@pytest.mark.parametrize("learner", ["fednca-ml", "fedlgt", "ml-decoder"])
def test_bf16_trains_with_every_head_and_its_fisher_is_near_float32s(learner, tmp_path):
    config = tiny(method__name="fedcurv", method__learner=learner, train__rounds=1)
    exact = train(config, tmp_path / "float32").state("last").server.state
    rounded = train(config.replace({"train.precision": "bf16"}), tmp_path / "bf16").state("last").server.state
    diagonals = [torch.cat([own[name].flatten() for name in exact if "/u/" in name]) for own in (exact, rounded)]
    assert torch.nn.functional.cosine_similarity(*diagonals, dim=0) > 0.9

"""Centralised training against an ordinary PyTorch loop over all training images."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Stop, StopAfter, tiny

from fednca.base.randomness import torch_rng
from fednca.data.load import load_dataset
from fednca.engines.model import build_model
from fednca.methods import create_method
from fednca.runs import resume, train


@pytest.fixture
def config():
    # a client sees half of the classes here, so that some of the pairs fit none of them
    return tiny(method__name="centralized", partition__gamma=0.5, train__precision="float64")


def plain_loop(config, epochs):
    split = load_dataset(config).train
    images = torch.from_numpy(split.images).permute(0, 3, 1, 2).double() / 127.5 - 1
    labels = torch.from_numpy(split.labels).double()
    model = build_model(config, create_method(config), tuple("0123456789"), pretrained="none").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.lr, weight_decay=0.01)
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(images), generator=torch_rng(0, "batches", epoch, 0))
        for rows in order.split(32):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(images[rows]).logits, labels[rows]).backward()
            optimizer.step()
    return model.state_dict()


def test_is_plain_training_on_all_images_with_one_optimiser_also_after_a_resume(config, tmp_path):
    run = train(config, tmp_path / "whole")
    dealt = sum(map(len, run.federation.train.partition.clients))
    assert dealt < len(run.federation.dataset.train)  # else nothing would show that the rest is trained on
    weights = run.state("last").server.weights
    torch.testing.assert_close(weights, dict(plain_loop(config, 3)), rtol=0, atol=1e-9)

    with pytest.raises(Stop):
        train(config, tmp_path / "halves", [StopAfter(1)])
    resumed = resume(tmp_path / "halves").state("last").server.weights
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0)


def test_another_learner_is_trained_on_all_images_too(config, tmp_path):
    run = train(config.replace({"method.learner": "fednca-ml", "train.rounds": 1}), tmp_path / "run")
    assert set(run.history[0]["losses"]) == {"bce", "neg", "pos"}
    assert set(run.history[0]["clients"]) == {"0"}

"""A closing of two exchanges, which a config can name: what the second adds up needs what came of the first."""

import numpy as np

from fednca.methods.contract import About, Closing, Method, Rule, Server
from fednca.methods.fedavg import LinearLearner

NAME = f"{__name__}:STANDARDIZED"  # of the method, in a config


class Standardize(Closing):
    """Lets the linear classifier see features of mean 0 and standard deviation 1 over all clients' images."""

    needs = LinearLearner

    epsilon: float = 1e-3
    """Added to the variances, some of which may be zero."""

    def sums(self, model, images, labels, asked):
        features = model(images).features.double()
        if not asked:
            return {"images": features.new_tensor(len(features)), "features": features.sum(0)}
        return {"squares": (features - asked["mean"]).square().sum(0)}

    def close(self, server):
        first = yield {}
        mean = first["features"] / first["images"]
        second = yield {"mean": mean}
        W, b = (server.weights[f"head.linear.{name}"] for name in ("weight", "bias"))
        scaled = W.double() / (second["squares"] / first["images"] + self.epsilon).sqrt()
        closed = {
            "head.linear.weight": scaled.to(W.dtype),
            "head.linear.bias": (b.double() - scaled @ mean).to(b.dtype),
        }
        return Server(server.weights | closed, server.state)


STANDARDIZED = Method("standardized", About("", "", ""), LinearLearner(), Rule(), Standardize())


def assert_standardized(found, trained, features, epsilon=1e-3):
    """Compare the classifier with NumPy's on all clients' features (N, d), and the rest with what was trained."""
    W, b = (trained[f"head.linear.{name}"].double().numpy() for name in ("weight", "bias"))
    scaled = W / np.sqrt(features.var(axis=0) + epsilon)
    assert np.abs(scaled - W).max() > 0.1
    np.testing.assert_allclose(found["head.linear.weight"], scaled, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["head.linear.bias"], b - scaled @ features.mean(axis=0), rtol=1e-4, atol=1e-5)
    others = [name for name in found if not name.startswith("head.")]
    assert others
    assert all((found[name] == trained[name]).all() for name in others)

"""SphereFed (Dong et al., 2022): unit features trained towards a fixed orthonormal classifier, calibrated at last.

The calibration is ridge regression of the multi-hot labels on the trained features: clients send sums of products, and
the server solves for the classifier in closed form. An unknown label counts as absent in it, since its sums cannot
leave out single pairs. Calibration belongs to the federated rule: another rule on this learner trains it but does not
calibrate it.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fednca.errors import FedncaError, RunFailedError
from fednca.methods.base import About, Local, Method, Server, Task, Tensors
from fednca.models.cosine import SphereHead
from fednca.models.etf import orthonormal_rows
from fednca.options import Options


class SphereFedHyper(Options):
    """SphereFed's choices."""

    target: Literal["scaled", "shifted"] = "scaled"
    """Train cosines towards y/√|Y| for |Y| labels, or (cos+1)/2 towards y as in the authors' code."""
    ridge: float = Field(default=1e-3, ge=1e-10, allow_inf_nan=False)
    """ε of the closed-form classifier; the eigenvalues it is added to sum to the number of images."""
    classifier_seed: int = Field(default=0, ge=0)
    """Seed of the fixed class vectors; the same for all clients, independent of the training seed."""


class SphereFed(Method):
    """MSE of cosines with fixed orthonormal class vectors; after training, a closed-form classifier replaces these."""

    Hyper = SphereFedHyper
    about = About(
        paper="Dong et al., 2022",
        head="unit feature + fixed orthonormal class vectors",
        objective="MSE",
        aggregation="average, then closed-form classifier",
        formula="L = mean (w_c·z - y_c/√|Y|)²; w ← Σ_k w_k / K; at the end W = ((Σ zzᵀ + εI)⁻¹ Σ zyᵀ)ᵀ",
    )
    closes = True
    hyper: SphereFedHyper

    def settle(self) -> None:
        """Refuse a learner without the classifier that the calibration replaces."""
        if self.learner is not self:
            raise FedncaError("spherefed calibrates its own classifier; to train another learner, use fedavg")

    def head(self, task: Task) -> nn.Module:
        """Build the orthonormal classifier; (W·z + 1)/2 is one too, so that its scores are what is regressed."""
        if self.criterion is not None:
            raise FedncaError("spherefed regresses its targets by MSE in place of BCE; leave method.criterion out")
        W = orthonormal_rows(len(task.classes), task.dim, self.hyper.classifier_seed, "sphere")
        return SphereHead(W, 0.0) if self.hyper.target == "scaled" else SphereHead(W / 2, 0.5)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return the squared error, the mean over all known labels of the batch."""
        scores = model(images).logits
        known = labels >= 0
        target = labels.clamp(min=0)
        if self.hyper.target == "scaled":
            target = target / target.sum(dim=1, keepdim=True).clamp(min=1).sqrt()
        return {"mse": ((scores - target).square() * known).sum() / known.sum().clamp(min=1)}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Clip the scores, which are regressions of 0 and 1."""
        return logits.clamp(0, 1)

    def close_sums(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of V_k = Σ zzᵀ (d, d) and U_k = Σ zyᵀ (d, C), in float64."""
        features, y = model(images).features.double(), labels.double().clamp(min=0)
        return {"V": features.T @ features, "U": features.T @ y}

    def close_server(self, server: Server, sums: list[Tensors]) -> Server:
        """Replace the classifier by the ridge regression of the labels on all clients' features."""
        V, U = (torch.stack([each[name] for each in sums]).sum(dim=0) for name in ("V", "U"))
        V.diagonal().add_(self.hyper.ridge)
        factor, failed = torch.linalg.cholesky_ex(V)
        if failed:
            raise RunFailedError(
                f"the features' covariance is singular at ridge {self.hyper.ridge:g}; use a larger one"
            )
        W = torch.cholesky_solve(U, factor).T
        old = server.weights["head.weight"]
        calibrated = {
            "head.weight": W.to(old.dtype).contiguous(),
            "head.offset": torch.zeros_like(server.weights["head.offset"]),
        }
        return Server(server.weights | calibrated, server.state)


METHOD = SphereFed

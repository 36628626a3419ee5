"""SphereFed (Dong et al., 2022): unit features trained towards fixed class vectors, then a closed-form classifier.

The classifier is a ridge regression of the labels on the trained features: clients send sums of products, and the
server solves for it. An unknown label counts as absent, since the sums cannot leave out single pairs. This is the
method's closing: under another rule, add it with `--closing spherefed`.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fednca.base.errors import RunFailedError
from fednca.methods.contract import About, Closing, Exchanges, Learner, Local, Method, Rule, Server, Tensors
from fednca.models.cosine import SphereHead
from fednca.models.etf import orthonormal_rows
from fednca.models.heads import Head


class SphereLearner(Learner):
    """MSE of cosines with fixed orthonormal class vectors."""

    own_loss: ClassVar[bool] = True

    target: Literal["scaled", "shifted"] = "scaled"
    """Train cosines towards y/√|Y| for |Y| labels, or (cos+1)/2 towards y as in the authors' code."""
    classifier_seed: int = Field(default=0, ge=0)
    """Seed of the fixed class vectors; the same for all clients, independent of the training seed."""

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the orthonormal classifier; for `shifted`, its scores are (W·z + 1)/2, which is linear in z, too."""
        W = orthonormal_rows(len(classes), dim, self.classifier_seed, "sphere")
        return SphereHead(W, 0.0) if self.target == "scaled" else SphereHead(W / 2, 0.5)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return the squared error, the mean over all known labels of the batch."""
        scores = model(images).logits
        known = labels >= 0
        target = labels.clamp(min=0)
        if self.target == "scaled":
            target = target / target.sum(dim=1, keepdim=True).clamp(min=1).sqrt()
        return {"mse": ((scores - target).square() * known).sum() / known.sum().clamp(min=1)}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Clip the scores, which estimate 0 or 1."""
        return logits.clamp(0, 1)


class ClosedForm(Closing):
    """Ridge regression of the labels on all clients' features, in one exchange."""

    needs: ClassVar[type[Learner]] = SphereLearner

    ridge: float = Field(default=1e-3, ge=1e-10, allow_inf_nan=False)
    """ε of the closed-form classifier; the eigenvalues it is added to sum to the number of images."""

    def sums(self, model: nn.Module, images: Tensor, labels: Tensor, asked: Tensors) -> Tensors:
        """Return a batch's part of V_k = Σ zzᵀ (d, d) and U_k = Σ zyᵀ (d, C), in float64."""
        features, y = model(images).features.double(), labels.double().clamp(min=0)
        return {"V": features.T @ features, "U": features.T @ y}

    def close(self, server: Server) -> Exchanges:
        """Replace the classifier by the ridge regression of the labels on all clients' features."""
        total = yield {}
        V, U = total["V"], total["U"]
        V.diagonal().add_(self.ridge)
        factor, failed = torch.linalg.cholesky_ex(V)
        if failed:
            raise RunFailedError(f"the features' covariance is singular at ridge {self.ridge:g}; use a larger one")
        W = torch.cholesky_solve(U, factor).T
        old = server.weights["head.weight"]
        calibrated = {
            "head.weight": W.to(old.dtype).contiguous(),
            "head.offset": torch.zeros_like(server.weights["head.offset"]),
        }
        return Server(server.weights | calibrated, server.state)


METHOD = Method(
    "spherefed",
    About(
        summary="MSE of cosines with fixed orthonormal class vectors; in use, a closed-form classifier replaces them.",
        paper="Dong et al., 2022",
        head="unit feature + fixed orthonormal class vectors",
        objective="MSE",
        aggregation="average, then closed-form classifier",
        formula="L = mean (w_c·z - y_c/√|Y|)²; w ← Σ_k w_k / K; to judge: W = ((Σ zzᵀ + εI)⁻¹ Σ zyᵀ)ᵀ",
    ),
    SphereLearner(),
    Rule(),
    ClosedForm(),
)

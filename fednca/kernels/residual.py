"""Residual blocks of timm's ResNets whose last BatchNorm adds the shortcut, and does the ReLU behind the sum."""

from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn


class FusedBasicBlock(BasicBlock):
    """Two convolutions and a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(bn2(…) + shortcut)."""
        y = self.conv2(self.act1(self.bn1(self.conv1(x))))
        found: Tensor = self.bn2(y, x if self.downsample is None else self.downsample(x))
        return found


class FusedBottleneck(Bottleneck):
    """Three convolutions and a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(bn3(…) + shortcut)."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.conv3(self.act2(self.bn2(self.conv2(y))))
        found: Tensor = self.bn3(y, x if self.downsample is None else self.downsample(x))
        return found


FUSED: dict[type[nn.Module], type[nn.Module]] = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck}


def last_norm(block: nn.Module) -> str:
    """Return the name of the BatchNorm before the sum, or nothing where a module is another or has further parts."""
    if type(block) not in FUSED:
        return ""
    last = "3" if isinstance(block, Bottleneck) else "2"
    further = [getattr(block, part) for part in ("se", "drop_path", "drop_block", "aa")]
    plain = all(part is None or type(part) is nn.Identity for part in further)
    return f"bn{last}" if plain and type(getattr(block, f"act{last}")) is nn.ReLU else ""

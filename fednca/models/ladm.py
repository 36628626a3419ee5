"""Label-aware disentanglement (LADM): cross-attention that reads one feature per class from a feature map."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednca.base.errors import FedncaError


def sincos_table(height: int, width: int, dim: int) -> Tensor:
    """Return the fixed 2-D sine-cosine position table in float64.

    The first half of the channels encodes y, the second x; even channels are sines, odd ones cosines.

    Returns: (H*W, d), row y*W + x.
    """
    if dim % 4:
        raise FedncaError(
            f"a position table of {dim} channels cannot be built; use a multiple of 4, or set position to false"
        )
    frequencies = 10000 ** (-4 / dim * torch.arange(dim // 4, dtype=torch.float64))
    y, x = (_sincos_axis(size, frequencies) for size in (height, width))
    grid = torch.cat([y[:, None].expand(-1, width, -1), x[None].expand(height, -1, -1)], dim=-1)
    return grid.flatten(0, 1)


def _sincos_axis(size: int, frequencies: Tensor) -> Tensor:
    """Encode the coordinates 0 … size-1 of one axis: (f,) frequencies give (size, 2f)."""
    angles = torch.arange(size, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class LADM(nn.Module):
    """Multi-head attention from one query per class to the positions of a feature map.

    queries: (C, d), fixed and not in the state dict, unless `learnable_queries`.
    """

    queries: Tensor

    def __init__(
        self, dim: int, queries: Tensor, heads: int = 4, position: bool = True, learnable_queries: bool = False
    ) -> None:
        """Build the attention; `dim` must be a multiple of `heads`, and of 4 if `position` is on."""
        super().__init__()
        if dim % heads:
            raise FedncaError(f"{heads} attention heads do not divide {dim} channels; use a divisor of {dim}")
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.position = position
        if learnable_queries:
            self.queries = nn.Parameter(queries.clone(memory_format=torch.contiguous_format))
        else:
            self.register_buffer("queries", queries.clone(), persistent=False)
        self._tables: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    def forward(self, feature_map: Tensor) -> Tensor:
        """Turn a feature map (B, d, H, W) into one feature per class (B, C, d).

        It does what `self.attention` does, but projects the queries once, not for each image.
        """
        tokens = self._tokens(feature_map)
        heads, width = self.attention.num_heads, self.attention.head_dim
        dims = [heads * width, 2 * heads * width]
        assert self.attention.in_proj_weight is not None
        weight, weight_kv = torch.split(self.attention.in_proj_weight, dims)
        bias, bias_kv = torch.split(self.attention.in_proj_bias, dims)
        queries = F.linear(self.queries, weight, bias).view(-1, heads, width).transpose(0, 1)
        projected = F.linear(tokens, weight_kv, bias_kv).view(*tokens.shape[:2], 2, heads, width)
        keys, values = projected.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries.expand(tokens.shape[0], -1, -1, -1), keys, values)
        features: Tensor = self.attention.out_proj(attended.transpose(1, 2).flatten(2))
        return features

    def forward_with_attention(self, feature_map: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (B, C, d) and where each head looked for them (B, heads, C, H, W)."""
        tokens = self._tokens(feature_map)
        queries = self.queries.expand(len(tokens), -1, -1)
        features, weights = self.attention(queries, tokens, tokens, average_attn_weights=False)
        return features, weights.reshape(*weights.shape[:-1], *feature_map.shape[-2:])

    def _tokens(self, feature_map: Tensor) -> Tensor:
        """Return Z (B, S, d), or Z~ = Z + P, for both keys and values."""
        tokens = feature_map.flatten(2).transpose(1, 2)
        return tokens + self._table(feature_map) if self.position else tokens

    def _table(self, feature_map: Tensor) -> Tensor:
        """Return P for this map's size, built once per size, device and dtype."""
        (height, width), device, dtype = feature_map.shape[-2:], feature_map.device, feature_map.dtype
        key = (height, width, device, dtype)
        if key not in self._tables:
            # A table that is first built in evaluation must stay usable in training.
            with torch.inference_mode(False):
                self._tables[key] = sincos_table(height, width, feature_map.shape[1]).to(device, dtype)
        return self._tables[key]

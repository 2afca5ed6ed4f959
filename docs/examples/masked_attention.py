import torch
import torch.nn.functional as F

import fuse


@fuse.pattern(finite=True)
class MaskedAttention:
    """softmax(q k^T / c + mask) v as one call of PyTorch's fused attention."""

    def pattern(
        self, q=fuse.tensor(dtype="T"), k=fuse.tensor(dtype="T"), v=fuse.tensor(dtype="T"), mask=fuse.tensor(dtype="T")
    ):
        scores = q @ k.transpose(-2, -1) / fuse.const("c")
        return torch.softmax(scores + mask, dim=-1) @ v

    def replace(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / fuse.const("c"))

    def examples(self):
        q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
        return q, k, v, torch.randn(2, 1, 1, 16)

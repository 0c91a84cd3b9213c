from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        d = D // self.heads
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, d)  # eq. 5
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, h, N, d)
        scores = q @ k.transpose(-2, -1) / d**0.5  # (B, h, N, N)
        weights = scores.softmax(dim=-1)  # eq. 6: each row sums to 1
        x = weights @ v  # (B, h, N, d), eq. 7
        x = x.transpose(1, 2).reshape(B, N, D)  # heads side by side
        return self.proj(x)  # (B, N, D), eq. 8

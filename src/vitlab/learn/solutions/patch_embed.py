from torch import Tensor, nn


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, channels: int, width: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(channels * patch_size**2, width)

    def forward(self, images: Tensor) -> Tensor:
        B, C, H, W = images.shape
        P = self.patch_size
        x = images.reshape(B, C, H // P, P, W // P, P)
        x = x.permute(0, 2, 4, 1, 3, 5)  # (B, H/P, W/P, C, P, P)
        x = x.flatten(3).flatten(1, 2)  # (B, N, C*P*P)
        return self.proj(x)  # (B, N, D), eq. 1

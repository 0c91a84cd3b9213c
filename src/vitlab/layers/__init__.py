"""Parts that two or more papers use unchanged. Shapes: (B, C, H, W) images, (B, N, D) tokens, (B, h, N, d) heads."""

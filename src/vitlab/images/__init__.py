"""Image file -> (B, C, H, W), and the way back to the original image."""

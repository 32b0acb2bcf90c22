"""Likeness to a target picture: mean squared error, PSNR, SSIM and the learned distance LPIPS."""

"""Likeness to a target image: mean squared error, PSNR, SSIM and the learned distance LPIPS."""

"""The hand-set autoencoder is the identity."""

import torch

from data.tiny_glm_image.components import build_identity_vae


def test_latents_are_pixels_and_decode_to_them() -> None:
    vae = build_identity_vae(latent_std=0.2, sample_size=64)
    pixels = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # A group norm is hardest to pin where an image is flat.
    pixels[3] = 1.0
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        decoded = vae.decode(posterior.mode()).sample
    torch.testing.assert_close(posterior.mode(), pixels, atol=1e-4, rtol=0)
    torch.testing.assert_close(posterior.sample(torch.Generator().manual_seed(0)), pixels, atol=1e-4, rtol=0)
    torch.testing.assert_close(decoded, pixels, atol=1e-4, rtol=0)


def test_scaling_is_left_to_the_pipeline() -> None:
    assert list(build_identity_vae(latent_std=0.2, sample_size=64).config.latents_std) == [0.2, 0.2, 0.2]

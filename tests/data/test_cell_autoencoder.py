"""The autoencoder with weights set by hand, at one level of resolution and at four."""

import pytest
import torch

from data.cell_autoencoder import build_cell_autoencoder


@pytest.mark.parametrize("levels", [1, 4])
def test_a_latent_is_the_mean_of_its_square_and_is_painted_flat(levels: int) -> None:
    vae, side = build_cell_autoencoder(levels=levels, sample_size=64), 2 ** (levels - 1)
    pixels = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # A group norm is hardest to pin where an image is flat.
    pixels[3] = 1.0
    means = pixels.unflatten(3, (-1, side)).unflatten(2, (-1, side)).mean((3, 5))
    painted = means.repeat_interleave(side, 2).repeat_interleave(side, 3)
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        sampled = posterior.sample(torch.Generator().manual_seed(0))
        for latents in (posterior.mode(), sampled):
            torch.testing.assert_close(latents, means, atol=1e-4, rtol=0)
        torch.testing.assert_close(vae.decode(posterior.mode()).sample, painted, atol=1e-4, rtol=0)

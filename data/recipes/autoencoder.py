"""An autoencoder with weights set by hand, whose latents are the mean colours of squares."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL
from torch import nn

_CHANNELS = 8
# Two constant channels of this size pin the group's standard deviation, for any image.
_PIN = 1000.0


def build_cell_autoencoder(*, levels: int, sample_size: int, **config: object) -> AutoencoderKL:
    """Build an autoencoder of three latent channels that keeps images whose squares are of one colour each.

    A pixel a passes the nonlinearity as the pair (a, -a), because silu(a) - silu(-a) = a; residual branches add zero.
    Encoding takes the mean of each square of 2 ** (levels - 1) pixels and decoding paints it flat, both within 1e-4 of
    pixels in [-1, 1]. `config` is AutoencoderKL's, such as its scaling factor.
    """
    vae = AutoencoderKL(
        block_out_channels=(_CHANNELS,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=3,
        norm_num_groups=1,
        layers_per_block=1,
        sample_size=sample_size,
        mid_block_add_attention=False,
        **config,
    )
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "resnets" in name and "conv2" in name:
                parameter.zero_()
        for name, module in vae.named_modules():
            if name.endswith(("downsamplers.0.conv", "upsamplers.0.conv")):
                _set_resampling(module, averages="downsamplers" in name)
        for half in (vae.encoder, vae.decoder):
            _set_centres(half.conv_in, [(2 * c + s, c, 1.0 - 2 * s) for c in range(3) for s in (0, 1)])
            half.conv_in.bias[6:] = torch.tensor([_PIN, -_PIN])
            half.conv_norm_out.weight.fill_(_PIN * (2 / _CHANNELS) ** 0.5)
            half.conv_norm_out.bias.zero_()
            _set_centres(half.conv_out, [(c, 2 * c + s, 1.0 - 2 * s) for c in range(3) for s in (0, 1)])
        # Log-variance of the posterior: its samples are its mode.
        vae.encoder.conv_out.bias[3:] = -30.0
        for convolution in (vae.quant_conv, vae.post_quant_conv):
            convolution.bias.zero_()
            convolution.weight.copy_(torch.eye(convolution.out_channels)[:, :, None, None])
    return vae.eval()


def _set_resampling(convolution: nn.Conv2d, *, averages: bool) -> None:
    """Keep the channels apart; the encoder's strided convolution averages the four pixels of a square of two by two."""
    assert convolution.bias is not None
    convolution.weight.zero_()
    convolution.bias.zero_()
    kept = torch.eye(convolution.out_channels)
    if averages:
        # The encoder pads on the right and at the bottom alone, so that the first two taps of an axis are the square.
        convolution.weight[:, :, :2, :2] = kept[:, :, None, None] / 4
    else:
        convolution.weight[:, :, 1, 1] = kept


def _set_centres(convolution: nn.Conv2d, entries: Sequence[tuple[int, int, float]]) -> None:
    """Make a convolution zero but for the centres of these (output, input) channels."""
    assert convolution.bias is not None
    convolution.weight.zero_()
    convolution.bias.zero_()
    middle = convolution.kernel_size[0] // 2
    for output, source, value in entries:
        convolution.weight[output, source, middle, middle] = value

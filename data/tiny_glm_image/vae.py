"""An AutoencoderKL that is the identity: latents are pixels, and nothing needs training."""

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

_CHANNELS = 8
# Two constant channels of this size pin the group's standard deviation, whatever the image holds.
_PIN = 1000.0


def build_identity_vae(latent_std: float, sample_size: int) -> AutoencoderKL:
    """Builds a stock AutoencoderKL with scale factor 1 whose weights are set by hand to the identity.

    A pixel a passes the nonlinearity as the pair (a, -a), because silu(a) - silu(-a) = a; residual branches add zero.

    Args:
        latent_std: the pipeline's latents are pixels in [-1, 1] divided by it.
        sample_size: pixels a side, kept in the configuration.

    Returns:
        The autoencoder in evaluation mode; encoding and decoding keep pixels in [-1, 1] within 1e-4.
    """
    vae = AutoencoderKL(
        block_out_channels=(_CHANNELS,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=3,
        norm_num_groups=1,
        layers_per_block=1,
        sample_size=sample_size,
        mid_block_add_attention=False,
        latents_mean=(0.0, 0.0, 0.0),
        latents_std=(latent_std, latent_std, latent_std),
    )
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "resnets" in name and "conv2" in name:
                parameter.zero_()
        for half in (vae.encoder, vae.decoder):
            _split_signs(half.conv_in)
            half.conv_norm_out.weight.fill_(_PIN * (2 / _CHANNELS) ** 0.5)
            half.conv_norm_out.bias.zero_()
            _join_signs(half.conv_out)
        # Log-variance of the posterior: its samples are its mode.
        vae.encoder.conv_out.bias[3:] = -30.0
        for convolution in (vae.quant_conv, vae.post_quant_conv):
            convolution.bias.zero_()
            convolution.weight.copy_(torch.eye(convolution.out_channels)[:, :, None, None])
    return vae.eval()


def _centre(convolution: nn.Conv2d) -> Tensor:
    middle = convolution.kernel_size[0] // 2
    return convolution.weight[:, :, middle, middle]


def _split_signs(convolution: nn.Conv2d) -> None:
    convolution.weight.zero_()
    assert convolution.bias is not None
    convolution.bias.zero_()
    for channel in range(3):
        _centre(convolution)[2 * channel, channel] = 1.0
        _centre(convolution)[2 * channel + 1, channel] = -1.0
    convolution.bias[6:] = torch.tensor([_PIN, -_PIN])


def _join_signs(convolution: nn.Conv2d) -> None:
    convolution.weight.zero_()
    assert convolution.bias is not None
    convolution.bias.zero_()
    for channel in range(3):
        _centre(convolution)[channel, 2 * channel] = 1.0
        _centre(convolution)[channel, 2 * channel + 1] = -1.0

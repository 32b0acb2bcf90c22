import io

import pytest
from PIL import Image, features

from grpo_core.errors import InputError
from grpo_core.rewards.image_statistics.jpeg import JpegReward, jpeg_bytes
from grpo_core.rewards.reward import Score, provenance_of
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def plain_save(image: Image.Image, quality: int) -> int:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return len(buffer.getvalue())


@pytest.mark.parametrize("quality", [1, 50, 95, 100])
def test_size_is_that_of_a_plain_pillow_file(quality: int) -> None:
    image = noise(3, 40, 24)
    (score,) = JpegReward(quality=quality).score(make_batch([image]))
    assert score.raw == plain_save(image, quality) / 1000


def test_value_in_both_directions_by_hand() -> None:
    image = noise(3, 40, 24)
    kilobytes = plain_save(image, 95) / 1000
    # Uncompressed: 40 * 24 pixels of 3 bytes.
    share = kilobytes / 2.88
    assert 0 < share < 1
    batch = make_batch([image])
    assert JpegReward().score(batch) == [Score(1 - share, kilobytes)]
    assert JpegReward(direction="incompressible").score(batch) == [Score(share, kilobytes)]
    assert JpegReward(full_scale_kilobytes=10).score(batch) == [Score(1 - kilobytes / 10, kilobytes)]


def test_value_ends_at_the_scale() -> None:
    batch = make_batch([noise(3, 40, 24)])
    assert JpegReward(full_scale_kilobytes=0.5).score(batch)[0].value == 0.0
    assert JpegReward(full_scale_kilobytes=0.5, direction="incompressible").score(batch)[0].value == 1.0


def test_smooth_images_score_above_noise() -> None:
    ramp = Image.linear_gradient("L").convert("RGB").resize((64, 64))
    smooth, shaded, noisy = JpegReward().score(make_batch([flat(9, 64, 64), ramp, noise(0, 64, 64)]))
    assert smooth.value is not None
    assert shaded.value is not None
    assert noisy.value is not None
    assert smooth.value > shaded.value > noisy.value


def test_metadata_is_not_counted() -> None:
    bare, tagged = noise(4, 32, 32), noise(4, 32, 32)
    tagged.info.update(comment=b"x" * 500, xmp=b"y" * 500, dpi=(300, 300))
    assert plain_save(tagged, 95) > plain_save(bare, 95)
    assert jpeg_bytes(tagged, 95) == jpeg_bytes(bare, 95)


def test_a_scale_is_the_same_however_it_is_written() -> None:
    whole, broken = (provenance_of(JpegReward(full_scale_kilobytes=scale)) for scale in (50, 50.0))
    assert whole["settings_digest"] == broken["settings_digest"]


def test_a_side_longer_than_a_jpeg_can_have_is_refused() -> None:
    assert JpegReward().score(make_batch([flat(0, 65_500, 1)]))[0].value is not None
    with pytest.raises(InputError, match=r"rewards\.jpeg, sample s0: got 'image of 65501x1'\. A JPEG has at most"):
        JpegReward().score(make_batch([flat(0, 65_501, 1)]))


def test_version_names_the_encoder() -> None:
    encoder = features.version("libjpeg_turbo") or features.version("jpg")
    assert encoder
    assert JpegReward().version.startswith("1+")
    assert JpegReward().version.endswith(encoder)

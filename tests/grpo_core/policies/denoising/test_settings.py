from collections import Counter

import pytest

from grpo_core.errors import InputError
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.settings import check_fields


def made(**changes: object) -> DenoisingSettings:
    return DenoisingSettings(**{"num_inference_steps": 10, "guidance_scale": 1.0, **changes})


def starts(settings: DenoisingSettings, iterations: int, seed: int = 0) -> list[int]:
    return [settings.window_start(iteration, seed) for iteration in range(1, iterations + 1)]


def test_the_first_window_never_moves() -> None:
    assert starts(made(sde_window="first", sde_window_range=(1, 9)), 5) == [1] * 5


def test_a_sliding_window_moves_by_one_step_and_starts_over() -> None:
    settings = made(sde_window="sliding", sde_window_range=(1, 6), sde_window_size=2, sde_window_every=2)
    assert starts(settings, 10) == [1, 1, 2, 2, 3, 3, 4, 4, 1, 1]


def test_a_random_window_covers_its_range_evenly_and_repeats_with_its_seed() -> None:
    settings = made(sde_window="random", sde_window_range=(1, 6), sde_window_size=3)
    drawn = starts(settings, 600)
    assert set(drawn) == {1, 2, 3}
    assert all(150 < count < 250 for count in Counter(drawn).values())
    assert drawn == starts(settings, 600)
    assert drawn != starts(settings, 600, seed=1)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"sde_window_range": (0, 10)}, "rollout.sde_window_range"),
        ({"sde_window_range": (3, 3)}, "rollout.sde_window_range"),
        ({"sde_window_range": (4, 2)}, "rollout.sde_window_range"),
        ({"sde_window_size": 6}, "rollout.sde_window_range"),
        ({"num_inference_steps": 1}, "rollout.num_inference_steps"),
        ({"num_inference_steps": 5}, "rollout.sde_window_range"),
        ({"noise_level": 0.0}, "rollout.noise_level"),
        ({"sde_type": "cps", "noise_level": 1.1}, "rollout.noise_level"),
    ],
)
def test_a_window_without_density_is_refused(changes: dict[str, object], place: str) -> None:
    with pytest.raises(InputError) as refused:
        made(**changes).check_window()
    assert refused.value.place == place


def test_the_largest_window_leaves_the_last_step_alone() -> None:
    made(sde_window_range=(0, 9), sde_window_size=9).check_window()
    made(sde_type="cps", noise_level=1.0).check_window()


@pytest.mark.parametrize("changes", [{"sde_type": "ddim"}, {"noise_level": -0.1}, {"sde_window_size": -1}])
def test_values_outside_their_ranges_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        check_fields(made(**changes), "rollout")


def test_an_empty_window_is_after_the_last_step_and_needs_no_noise() -> None:
    settings = made(sde_window_size=0, sde_window_range=(0, 50), noise_level=0.0, sde_window="random")
    settings.check_window()
    assert set(starts(settings, 20)) == {settings.num_inference_steps}

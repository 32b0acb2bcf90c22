"""Drawing by the cumulative distribution, transformers' warpers as the oracle of truncation, and what is recorded."""

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_core.errors import InputError
from grpo_core.sampling import SupportRecorder, draw_tokens, truncate, uniform_numbers
from grpo_core.seeds import derive_seed, make_generator
from grpo_core.settings import Truncation

LARGEST_UNIFORM = 1.0 - 2.0**-53


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def ids_left(logprobs: Tensor) -> list[list[int]]:
    return [[index for index, value in enumerate(row) if value > -torch.inf] for row in logprobs.tolist()]


# --- drawing


def test_uniform_numbers_of_a_sample_depend_on_its_seed() -> None:
    numbers = uniform_numbers([3, 4, 3], 50)
    assert torch.equal(numbers[0], numbers[2])
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(uniform_numbers([4], 20)[0], numbers[1, :20])


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, LARGEST_UNIFORM, 1.0])
@pytest.mark.parametrize(("vocabulary", "possible"), [(6, (2, 4)), (5000, (1023, 1024)), (5000, (2100, 3500))])
def test_impossible_ids_are_never_drawn_at_the_edges(
    vocabulary: int, possible: tuple[int, int], uniform: float
) -> None:
    probabilities = torch.zeros(1, vocabulary)
    probabilities[0, possible] = torch.tensor([0.4, 0.6])
    (drawn,) = draw_tokens(probabilities.log(), torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert drawn == possible[uniform >= 0.4]


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM, 1.0])
def test_an_id_whose_probability_underflows_is_not_drawn(uniform: float) -> None:
    drawn = draw_tokens(torch.tensor([[-2000.0, 0.0, -2000.0]]), torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [1]


@given(st.integers(0, 2**32 - 1), st.integers(2, 100))
def test_a_row_is_drawn_alike_alone_and_beside_others(seed: int, support: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(4 * torch.randn(6, support, generator=generator), -1)
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    alone = [draw_tokens(logprobs[row : row + 1], uniforms[row : row + 1]).item() for row in range(6)]
    assert draw_tokens(logprobs, uniforms).tolist() == alone


@given(st.integers(0, 2**32 - 1), st.sampled_from([9, 2500]))
def test_draw_agrees_with_a_loop_over_the_ids(seed: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(3 * torch.randn(1, vocabulary, generator=generator), -1)
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    remaining, expected = float(uniform) * math.fsum(logprobs.double().exp().flatten().tolist()), 0
    for probability in logprobs.double().exp().flatten().tolist():
        remaining -= probability
        if remaining < 0:
            break
        expected += 1
    assert draw_tokens(logprobs, uniform).tolist() == [expected]


def test_a_row_of_nan_gives_an_id_that_exists() -> None:
    """The NaN then stands in the recorded log-prob, where collection refuses it by name."""
    for beyond in (0, 2000):
        logprobs = torch.cat([torch.full((1, 3), torch.nan), log(0.2, 0.3, 0.5)])
        logprobs = torch.nn.functional.pad(logprobs, (0, beyond), value=-torch.inf)
        drawn = draw_tokens(logprobs, torch.tensor([0.9, 0.9], dtype=torch.float64)).tolist()
        assert 0 <= drawn[0] < 3 + beyond
        assert drawn[1] == 2


# --- truncation


@pytest.mark.parametrize(
    ("truncation", "left"),
    [
        (Truncation(), [0, 1, 2, 3, 4]),
        (Truncation(top_k=1), [0]),
        (Truncation(top_k=2), [0, 1]),
        (Truncation(top_k=3), [0, 1, 2, 3]),  # the third and the fourth are equally likely
        (Truncation(top_k=9), [0, 1, 2, 3, 4]),
        (Truncation(top_p=0.3), [0]),
        (Truncation(top_p=0.41), [0, 1]),
        (Truncation(top_p=0.95), [0, 1, 2, 3]),
        (Truncation(top_p=1e-9), [0]),
        (Truncation(min_p=0.6), [0, 1]),
        (Truncation(min_p=0.3), [0, 1, 2, 3]),
        (Truncation(min_p=0.999), [0]),
        (Truncation(top_k=2, top_p=0.5), [0]),  # 0.4 / 0.7 alone is more than a half of what top-k left
    ],
    ids=str,
)
def test_truncation_by_hand(truncation: Truncation, left: list[int]) -> None:
    """Of 0.4, 0.3, 0.13, 0.13, 0.04; what is left adds up to one in its old proportions."""
    found = truncate(log(0.4, 0.3, 0.13, 0.13, 0.04), truncation)
    assert ids_left(found) == [left]
    kept = torch.tensor([0.4, 0.3, 0.13, 0.13, 0.04])[left]
    torch.testing.assert_close(found.exp()[0, left], kept / kept.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.875])
def test_the_nucleus_ends_where_its_sum_is_reached_exactly(top_p: float) -> None:
    """1/2, 1/4, 1/8, 1/8: every sum is exact, and an id more would not be the fewest."""
    found = truncate(torch.tensor([[3.0, 2.0, 1.0, 1.0]]).mul(math.log(2)).log_softmax(-1), Truncation(top_p=top_p))
    assert len(ids_left(found)[0]) == {0.25: 1, 0.5: 1, 0.75: 2, 0.875: 3}[top_p]


@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(1, 60),
    steps=st.sampled_from([0.0, 0.5, 2.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99]),
    impossible=st.booleans(),
)
def test_transformers_warpers_leave_the_same_ids(
    seed: int, vocabulary: int, steps: float, top_k: int, top_p: float, min_p: float, impossible: bool
) -> None:
    """Of ids equally likely at the nucleus' edge an unstable sort keeps any: with logits in steps, as many."""
    logits = 2 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(seed))
    if steps:
        logits = (logits / steps).round() * steps
    if impossible:
        logits[:, vocabulary // 2 + 1 :] = -torch.inf
    logprobs = logits.log_softmax(-1)
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(7, 1, dtype=torch.long), logprobs).log_softmax(-1)
    found = truncate(logprobs, Truncation(top_k=top_k, top_p=top_p, min_p=min_p))
    assert all(ids_left(found))
    assert steps or ids_left(found) == ids_left(expected)
    torch.testing.assert_close(found.sort(-1).values, expected.sort(-1).values, rtol=0, atol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([0.3, 0.75, 1.0]), st.sampled_from([0.0, 0.2]))
def test_a_row_is_cut_alike_alone_and_beside_others(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logprobs = torch.randn(5, 30, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
    truncation = Truncation(top_k=top_k, top_p=top_p, min_p=min_p)
    alone = [truncate(logprobs[row : row + 1], truncation) for row in range(5)]
    assert torch.equal(truncate(logprobs, truncation), torch.cat(alone))


def test_a_row_of_nan_stays_one() -> None:
    """Its log-prob is then refused by name; the row beside it is cut as ever."""
    logprobs = torch.cat([torch.full((1, 3), torch.nan), log(0.2, 0.3, 0.5)])
    cut = truncate(logprobs, Truncation(top_k=2, top_p=0.9, min_p=0.1))
    assert cut[0].isnan().all()
    assert ids_left(cut[1:]) == [[1, 2]]


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", 1.0), ("min_p", -0.1)],
)
def test_values_outside_their_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError) as caught:
        Truncation(**{field: value})  # type: ignore[arg-type]
    assert (caught.value.place, str(caught.value.value)) == (f"rollout.{field}", str(value))


# --- recording


@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.lists(
            st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 6), min_size=1)), min_size=rows, max_size=rows),
            min_size=1,
            max_size=5,
        )
    ),
    st.integers(1, 3),
)
def test_what_is_recorded_is_what_could_be_drawn(steps: list[list[tuple[bool, set[int]]]], look: int) -> None:
    assume(any(active for step in steps for active, _ in step))
    recorder, rows = SupportRecorder(len(steps[0])), range(len(steps[0]))
    possible = torch.tensor(
        [[[active and index in ids for index in range(7)] for active, ids in step] for step in steps]
    )
    for part in possible.split(look):
        kept = [row for row in rows if part[:, row].any()]
        recorder.add(part[:, kept].transpose(0, 1), kept)
    support = recorder.support(len(steps))
    by_row = [[sorted(ids) if active else [] for active, ids in row] for row in zip(*steps, strict=True)]
    assert support.counts.tolist() == [[len(ids) for ids in row] for row in by_row]
    assert support.ids.tolist() == [index for row in by_row for ids in row for index in ids]


PARTS = st.lists(st.integers() | st.text(max_size=4) | st.sampled_from(["\x1f", "\x1fstr:b", "a\x1f"]), max_size=4)


def test_value_is_pinned() -> None:
    """Stored runs depend on it: `hashlib.sha256(b"int:0").digest()`, first 8 bytes, one bit off."""
    assert derive_seed(0) == 3696793467068528757


@example([1], ["1"])
@example([1, 2], [12])
@example(["a", "b"], ["ab"])
@example(["a\x1fstr:b"], ["a", "b"])
@example([], [""])
@given(PARTS, PARTS)
def test_distinct_places_have_distinct_seeds(first: list[int | str], second: list[int | str]) -> None:
    assert (derive_seed(0, *first) == derive_seed(0, *second)) == (first == second)


def test_generator_depends_on_its_seed_alone() -> None:
    seed = derive_seed(1, "tokens")
    torch.manual_seed(0)
    first = torch.rand(3, generator=make_generator(seed))
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3, generator=make_generator(seed)))
    assert not torch.equal(first, torch.rand(3, generator=make_generator(seed + 1)))

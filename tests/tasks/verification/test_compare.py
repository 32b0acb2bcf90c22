"""Every value that differs is found at its place, and nothing else is: in tables, images, tensors, damaged files."""

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.models.initial import weights_digest
from tasks.storage import schemas
from tasks.verification.compare import DEFAULT_TOLERANCE, compare_artifacts, level_of
from tasks.verification.records import Difference
from tests.tasks.verification import made_artifacts as made
from tests.tasks.verification.made_artifacts import IDS, MOMENTS, WEIGHTS

Change = Callable[[made.Columns], object]
LEVEL = 65536.0  # a level of 255 in units in the last place of float32


def of_rollouts(folder: Path, change: Change, **written: Any) -> tuple[Difference, ...]:
    """Differences of changed, stored rollouts and healthy ones."""
    made.write_rollouts(folder / "computed", made.rollouts(), made.states())
    stored = made.rollouts()
    change(stored)
    return compare_artifacts(
        made.write_rollouts(folder / "stored", stored, made.states(), **written), folder / "computed"
    )


def of_policies(folder: Path, stored: dict[str, Any], computed: dict[str, Any], **options: Any) -> list[Difference]:
    made.write_policy(folder / "stored", **stored)
    made.write_policy(folder / "computed", **computed)
    return list(compare_artifacts(folder / "stored", folder / "computed", **options))


def only(found: tuple[Difference, ...] | list[Difference]) -> Difference:
    assert len(found) == 1, found
    return found[0]


def another(value: Any, kind: pa.DataType, entry: int) -> Any:
    """A value of the type that is another one in one place."""
    if pa.types.is_list(kind):
        at = entry % len(value)
        return [*value[:at], another(value[at], kind.value_type, entry), *value[at + 1 :]]
    if pa.types.is_struct(kind):
        return {**value, kind[-1].name: another(value[kind[-1].name], kind[-1].type, entry)}
    if pa.types.is_string(kind):
        return f"{value}!"
    if pa.types.is_floating(kind):
        return float(np.nextafter(np.float32(value), np.float32(9)))
    return not value if pa.types.is_boolean(kind) else value + 1


TABLES = {
    "part-*.parquet": (made.ROLLOUTS, made.rollouts),
    "scores.parquet": (schemas.REWARDS, lambda: made.columns_of(schemas.REWARDS)),
    "advantages.parquet": (schemas.ADVANTAGES, made.advantages),
}
COLUMNS = [
    (pattern, field)
    for pattern, (schema, _) in TABLES.items()
    for field in schema
    if field.name not in ("sample_id", "stream", "seconds", "prompt")
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(COLUMNS), st.integers(0, 2), st.integers(0, 5))
def test_one_value_that_differs_is_found_at_its_place(column: tuple[str, pa.Field], row: int, entry: int) -> None:
    (pattern, field), (_, make) = column, TABLES[column[0]]
    computed = make()
    stored = copy.deepcopy(computed)
    stored[field.name][row] = another(stored[field.name][row], field.type, entry)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / side for side in ("stored", "computed")]
        for folder, columns in zip(folders, (stored, computed), strict=True):
            if pattern == "part-*.parquet":
                made.write_rollouts(folder, columns, made.states())
            else:
                write = made.write_scores if pattern == "scores.parquet" else made.write_advantages
                folder.mkdir()
                write(folder, columns)
        found = only(compare_artifacts(*folders))
    assert found.place.startswith(f"{pattern}, {field.name}")
    assert (found.sample_id, found.count) == (IDS[row], 1)
    length = len(computed[field.name][row]) if pa.types.is_list(field.type) else 1
    assert found.stored != found.computed
    if pa.types.is_list(field.type):
        assert found.index is not None
        assert found.index.endswith(f" {entry % length}")
    assert (found.largest is not None) == ("float" in str(field.type) or "double" in str(field.type))


def test_cuts_compression_and_measured_columns_are_no_values(tmp_path: Path) -> None:
    def other_files(columns: made.Columns) -> None:
        columns["image"] = [{"bytes": made.png(100 + row, level=9), "path": f"{row}.png"} for row in range(3)]

    assert made.png(level=9) != made.png()
    assert of_rollouts(tmp_path, other_files, cuts=(1, 2), row_groups=True) == ()
    scores = made.columns_of(schemas.REWARDS)
    (tmp_path / "scores").mkdir()
    made.write_scores(tmp_path / "scores", scores)
    (tmp_path / "again").mkdir()
    made.write_scores(tmp_path / "again", {**scores, "seconds": [9.0] * 3})
    assert compare_artifacts(tmp_path / "scores", tmp_path / "again") == ()


def test_parts_that_are_cut_elsewhere_are_compared_row_by_row(tmp_path: Path) -> None:
    def change(columns: made.Columns) -> None:
        columns["seed"][2] += 1

    found = only(of_rollouts(tmp_path, change, cuts=(2,)))
    assert (found.place, found.sample_id, found.total) == ("part-*.parquet, seed", IDS[2], 3)


def test_distances_are_units_in_the_last_place_at_the_largest_magnitude(tmp_path: Path) -> None:
    def change(columns: made.Columns) -> None:
        columns["rollout_logprobs"][0][1] = float(np.nextafter(np.float32(2.0), np.float32(9)))
        columns["guidance_scale"][1] = 2.0 + 2**-22

    made_logprobs, guidance = sorted(of_rollouts(tmp_path, change), key=lambda each: each.place, reverse=True)
    # The largest of these log-probs is 7, whose last place is 2^-21; 2 has 2^-22. The largest guidance is 3.
    assert (made_logprobs.place, made_logprobs.largest) == ("part-*.parquet, rollout_logprobs", 0.5)
    assert (made_logprobs.stored, made_logprobs.computed) == ("2.0000002", "2.0")
    assert (guidance.largest, guidance.stored) == (1.0, "2.000000238418579")


@pytest.mark.parametrize("broken", [math.nan, math.inf, None])
def test_a_number_on_one_side_only_is_infinitely_far(tmp_path: Path, broken: float | None) -> None:
    def change(columns: made.Columns) -> None:
        columns["preview_reward"][1] = broken

    found = only(of_rollouts(tmp_path, change))
    assert (found.count, found.largest, found.stored) == (1, math.inf, "null" if broken is None else str(broken))


def test_equal_nan_and_null_are_equal_but_not_the_same(tmp_path: Path) -> None:
    for name, value in (("stored", math.nan), ("computed", math.nan), ("third", None)):
        (tmp_path / name).mkdir()
        made.write_scores(tmp_path / name, {**made.columns_of(schemas.REWARDS), "raw": [value, 0.0, -0.0]})
    assert compare_artifacts(tmp_path / "stored", tmp_path / "computed") == ()
    assert only(compare_artifacts(tmp_path / "stored", tmp_path / "third")).stored == "nan"


def test_what_follows_from_a_token_is_not_counted(tmp_path: Path) -> None:
    def change(columns: made.Columns) -> None:
        columns["token_ids"][1][2] = 99
        columns["rollout_logprobs"][1][1:] = [-9.0] * 3
        columns["image"][1] = {"bytes": made.png(0), "path": "1.png"}
        columns["denoising_logprobs"][1][0] = -9.0
        columns["finished"][1] = True

    tokens, logprobs = of_rollouts(tmp_path, change)
    assert (tokens.place, tokens.sample_id, tokens.index) == ("part-*.parquet, token_ids", IDS[1], "token 2")
    assert (tokens.stored, tokens.computed, tokens.count, tokens.largest) == ("99", "4", 1, None)
    # The one before the token is a difference of its own.
    assert (logprobs.place, logprobs.index, logprobs.count) == ("part-*.parquet, rollout_logprobs", "token 1", 1)


def test_lists_of_other_lengths_differ_where_one_ends(tmp_path: Path) -> None:
    def change(columns: made.Columns) -> None:
        columns["token_ids"][0] = columns["token_ids"][0][:2]
        columns["rollout_logprobs"][0] = columns["rollout_logprobs"][0][:2]

    found = only(of_rollouts(tmp_path, change))
    assert (found.index, found.stored, found.computed, found.count) == ("token 2", "ends after 2", "3", 1)


def test_rows_of_one_side_are_one_difference(tmp_path: Path) -> None:
    def leave_out(columns: made.Columns) -> None:
        for values in columns.values():
            del values[1]

    found = only(of_rollouts(tmp_path, leave_out))
    assert (found.place, found.sample_id, found.count) == ("part-*.parquet, rows", IDS[1], 1)
    assert (found.stored, found.computed, found.total) == ("no row", "a row", 3)


def test_a_row_that_stands_twice_is_a_row_too_many(tmp_path: Path) -> None:
    def repeat(columns: made.Columns) -> None:
        for values in columns.values():
            values.append(values[1])

    found = of_rollouts(tmp_path, repeat)[0]
    assert (found.place, found.sample_id, found.stored) == ("part-*.parquet, rows", IDS[1], "a row")


def test_rows_in_another_order_differ(tmp_path: Path) -> None:
    def swap(columns: made.Columns) -> None:
        for values in columns.values():
            values[0], values[1] = values[1], values[0]

    orders = of_rollouts(tmp_path, swap)
    assert [each.place for each in orders] == ["part-*.parquet, order of rows", "images-*.parquet, order of rows"]
    assert (orders[0].stored, orders[0].computed, orders[0].count) == (IDS[1], IDS[0], 2)


def test_pixels_are_compared_as_levels(tmp_path: Path) -> None:
    def change(columns: made.Columns) -> None:
        columns["image"][0]["bytes"] = made.png(100, pixel=104)
        columns["image"][2]["bytes"] = made.png(102, pixel=100)

    found = only(of_rollouts(tmp_path, change))
    assert (found.place, found.sample_id, found.index) == ("images-*.parquet, pixels", IDS[0], "[1, 2, 1]")
    assert (found.stored, found.computed, found.count, found.total) == ("104", "100", 2, 3 * 24)
    assert found.largest == 4 * LEVEL


def test_an_image_that_is_none_is_said(tmp_path: Path) -> None:
    def change(columns: made.Columns) -> None:
        columns["image"][1]["bytes"] = made.png()[:40]

    found = only(of_rollouts(tmp_path, change))
    assert found.stored.startswith("unreadable: ")
    assert found.largest == math.inf


def test_states_are_compared_by_sample(tmp_path: Path) -> None:
    made.write_rollouts(tmp_path / "computed", made.rollouts(), made.states())
    states = made.states()
    states[IDS[1]][1, 2] += 2**-20
    made.write_rollouts(tmp_path / "stored", made.rollouts(), states, cuts=(1,))
    found = only(compare_artifacts(tmp_path / "stored", tmp_path / "computed"))
    assert (found.sample_id, found.index, found.count) == (IDS[1], "[1, 2]", 1)
    # The largest state is 3, whose last place is 2^-22.
    assert found.largest == pytest.approx(4.0)
    del states[IDS[1]]
    made.write_rollouts(tmp_path / "without", made.rollouts(), states)
    gone = only(compare_artifacts(tmp_path / "without", tmp_path / "computed"))
    assert (gone.place, gone.sample_id) == ("states/part-*.safetensors, rows", IDS[1])
    assert compare_artifacts(tmp_path / "without", tmp_path / "computed", without=("states/*",)) == ()


def test_weights_are_compared_with_what_the_update_changed(tmp_path: Path) -> None:
    moved = {**WEIGHTS, "a.lora_B.weight": torch.tensor([3.0, 4.0 + 2**-10])}
    before = made.write_policy(tmp_path / "before", {**WEIGHTS, "a.lora_A.weight": torch.tensor([1.0, 1.75])})
    found = only(of_policies(tmp_path, {"weights": moved}, {}, previous=before))
    assert (found.place, found.index) == ("tokens/adapter_model.safetensors, a.lora_B.weight", "[1]")
    assert (found.stored, found.computed, found.count, found.total) == ("4.0009766", "4.0", 1, 4)
    # A change of 2^-2 in all, and 2^-10 of it differ: in units of 2^-23.
    assert found.largest == 2.0**15


def test_the_version_before_in_place_of_one_is_a_whole_update_away(tmp_path: Path) -> None:
    before = {**WEIGHTS, "a.lora_A.weight": torch.tensor([-5.0, 0.3])}
    folder = made.write_policy(tmp_path / "before", before)
    found = of_policies(tmp_path, {"weights": before}, {}, previous=folder)
    assert found[0].largest == pytest.approx(2.0**23)


def test_the_first_update_has_changed_what_it_began_with_at_zero(tmp_path: Path) -> None:
    moved = {**WEIGHTS, "a.lora_A.weight": torch.tensor([1.0, 2.0 + 2**-10])}
    # Two steps of 0.01 over four weights are less than the norm 5 of B.
    found = only(of_policies(tmp_path, {"weights": moved}, {}))
    assert found.largest == pytest.approx(2**-10 / 0.04 * 2**23)


def test_tensors_in_each_others_place_are_found(tmp_path: Path) -> None:
    swapped = dict(zip(WEIGHTS, reversed(WEIGHTS.values()), strict=True))
    found = only(of_policies(tmp_path, {"weights": swapped}, {}))
    assert (found.place, found.stored, found.count) == (
        "tokens/adapter_model.safetensors, a.lora_A.weight",
        "3.0",
        4,
    )


def test_moments_of_each_kind_have_a_scale_of_their_own(tmp_path: Path) -> None:
    moments = {**MOMENTS, "a.lora_B.weight|exp_avg_sq": torch.tensor([1e-6, 1e-6])}
    found = only(of_policies(tmp_path, {"moments": moments}, {}))
    assert (found.place, found.index) == ("tokens/optimizer.safetensors, a.lora_B.weight|exp_avg_sq", "[0]")
    # Next to the first moments, whose norm is 1, it would be nothing.
    assert found.largest == pytest.approx(2.0**23)


def test_copies_schedule_and_steps_come_after_the_weights(tmp_path: Path) -> None:
    weights = {**WEIGHTS, "a.lora_A.weight": torch.tensor([1.0, 2.5])}
    digest = weights_digest(made.write_policy(tmp_path / "moved", weights))
    stored = {
        "weights": weights,
        "copies": {"ema": {"a": torch.tensor([1.0])}, "old": WEIGHTS},
        "moments": {**MOMENTS, "a.lora_B.weight|step": torch.tensor(3.0)},
        "state": {**made.STATE, "policy_digest": digest, "optimizer_steps": {"tokens": 3}},
        "adapter": {**made.ADAPTER, "r": 4},
        "steps": {"loss": [1.0, 0.25]},
    }
    found = of_policies(tmp_path, stored, {"copies": {"ema": {"a": torch.tensor([1.5])}, "old": WEIGHTS}})
    assert [each.place for each in found] == [
        "tokens/adapter_model.safetensors, a.lora_A.weight",
        "tokens/ema/adapter_model.safetensors, a",
        "tokens/optimizer.safetensors, a.lora_B.weight|step",
        "training_state.json, optimizer_steps.tokens",
        "tokens/adapter_config.json, r",
        "tokens/update_steps.parquet, loss",
    ]
    assert (found[-1].sample_id, found[-1].index) == (None, "optimizer step 4")


def test_a_digest_that_the_weights_do_not_explain_differs(tmp_path: Path) -> None:
    found = only(of_policies(tmp_path, {"state": {**made.STATE, "policy_digest": "e" * 64}}, {}))
    assert found.place == "training_state.json, policy_digest"


def test_packages_and_the_order_of_names_in_a_set_are_no_values(tmp_path: Path) -> None:
    written = {**made.ADAPTER, "target_modules": ["b", "a"], "peft_version": "0.18.0"}
    assert of_policies(tmp_path, {"adapter": written}, {}) == []


@pytest.mark.parametrize(
    ("name", "by", "level"),
    [
        ("rollout_logprobs", 1e-3, "differs"),
        ("rollout_logprobs", 5e-5, "rounding"),
        ("token_ids", 1, "differs"),
        ("seed", 1, "differs"),
    ],
)
def test_what_is_rounding_in_a_row_of_rollouts(tmp_path: Path, name: str, by: float, level: str) -> None:
    def change(columns: made.Columns) -> None:
        values = columns[name]
        values[2] = values[2] + by if name == "seed" else [*values[2][:-1], values[2][-1] + by]

    found = of_rollouts(tmp_path, change)
    assert level_of(found, DEFAULT_TOLERANCE) == level
    assert level_of(found, 0.0) == "differs"


def test_log_probs_near_zero_have_the_rounding_of_those_near_one(tmp_path: Path) -> None:
    def small(columns: made.Columns) -> None:
        columns["rollout_logprobs"] = [[1e-4, 1e-5], [2e-4], [3e-4]]

    def change(columns: made.Columns) -> None:
        small(columns)
        columns["rollout_logprobs"][0][1] += 1e-6

    of_rollouts(tmp_path, change)
    stored = made.rollouts()
    small(stored)
    again = made.write_rollouts(tmp_path / "again", stored, made.states())
    # 2^-22 is the last place of 2, of 1 it is 2^-23: 8.4 of them are 1e-6.
    found = only(compare_artifacts(tmp_path / "stored", again))
    assert found.largest == pytest.approx(1e-6 * 2**23, rel=1e-3)


def test_an_advantage_that_is_moved_by_a_thousandth_differs(tmp_path: Path) -> None:
    for name, by in (("stored", 1e-3), ("computed", 0.0)):
        columns = made.advantages()
        (tmp_path / name).mkdir()
        made.write_advantages(tmp_path / name, {**columns, "advantage": [1.0 + by, 2.0, 3.0]})
    found = compare_artifacts(tmp_path / "stored", tmp_path / "computed")
    assert only(found).place == "advantages.parquet, advantage"
    assert level_of(found, DEFAULT_TOLERANCE) == "differs"


@pytest.mark.parametrize(("levels", "level"), [(1, "rounding"), (2, "differs"), (4, "differs")])
def test_a_level_of_a_pixel_is_rounding(tmp_path: Path, levels: int, level: str) -> None:
    def change(columns: made.Columns) -> None:
        columns["image"][0]["bytes"] = made.png(100, pixel=100 + levels)

    assert level_of(of_rollouts(tmp_path, change), DEFAULT_TOLERANCE) == level


@pytest.mark.parametrize(("units", "level"), [(1, "rounding"), (2, "rounding"), (3, "differs")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_in_16_bits_are_rounded_to_their_own_last_place(
    tmp_path: Path, units: int, level: str, dtype: torch.dtype
) -> None:
    states = {name: torch.full((4,), 1.0, dtype=dtype) for name in IDS}
    made.write_rollouts(tmp_path / "computed", made.rollouts(), states)
    moved = {**states, IDS[0]: states[IDS[0]] + units * torch.finfo(dtype).eps}
    made.write_rollouts(tmp_path / "stored", made.rollouts(), moved)
    found = compare_artifacts(tmp_path / "stored", tmp_path / "computed")
    assert only(found).largest == units * torch.finfo(dtype).eps * 2**23
    assert level_of(found, DEFAULT_TOLERANCE) == level


@pytest.mark.parametrize(("share", "level"), [(1e-3, "rounding"), (2e-2, "differs"), (1.0, "differs")])
def test_a_hundredth_of_an_update_is_no_rounding(tmp_path: Path, share: float, level: str) -> None:
    before = {name: torch.zeros(2) for name in WEIGHTS}
    folder = made.write_policy(tmp_path / "before", before)
    moved = {name: each * (1 + share) for name, each in WEIGHTS.items()}
    found = of_policies(tmp_path, {"weights": moved}, {}, previous=folder)
    assert found[0].largest == pytest.approx(share * 2**23, rel=1e-3)
    assert level_of(found, DEFAULT_TOLERANCE) == level


DAMAGED = {
    "part-00000.parquet": b"PAR1 no table PAR1",
    "images-00000.parquet": b"",
    "states/part-00000-00000.safetensors": (2**60).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_cannot_be_read_is_a_difference(tmp_path: Path, name: str) -> None:
    of_rollouts(tmp_path, lambda columns: None)
    (tmp_path / "stored" / name).write_bytes(DAMAGED[name])
    found = only(compare_artifacts(tmp_path / "stored", tmp_path / "computed"))
    assert found.stored.startswith("unreadable: ")
    assert str(tmp_path) not in found.stored
    assert (found.computed, level_of([found], DEFAULT_TOLERANCE)) == ("readable", "differs")


@pytest.mark.parametrize("content", ["[" * 100_000, "{", '{"policy_version": 1}'])
def test_json_that_is_none_is_a_difference(tmp_path: Path, content: str) -> None:
    of_policies(tmp_path, {}, {})
    (tmp_path / "stored" / "training_state.json").write_text(content)
    found = only(compare_artifacts(tmp_path / "stored", tmp_path / "computed"))
    assert found.place.startswith("training_state.json")


def test_columns_of_another_type_and_other_columns_are_said(tmp_path: Path) -> None:
    of_rollouts(tmp_path, lambda columns: None)
    path = tmp_path / "stored" / "part-00000.parquet"
    table = pa.parquet.read_table(path)
    seed = table.schema.get_field_index("seed")
    table = table.set_column(seed, "seed", table["seed"].cast(pa.string())).drop_columns(["top_k"])
    pa.parquet.write_table(table.append_column("more", pa.array(["x"] * 3)), path)
    found = compare_artifacts(tmp_path / "stored", tmp_path / "computed")
    assert {each.place.rpartition(" ")[2]: (each.stored, each.computed) for each in found} == {
        "seed": ("column of String", "column of Int64"),
        "top_k": ("no such column", "column of Int32"),
        "more": ("column of String", "no such column"),
    }


def test_files_that_only_one_side_has_are_said(tmp_path: Path) -> None:
    of_policies(tmp_path, {}, {})
    (tmp_path / "stored" / "tokens" / "optimizer.safetensors").unlink()
    (tmp_path / "stored" / "tokens" / "note[1].txt").write_text("mine")
    found = compare_artifacts(tmp_path / "stored", tmp_path / "computed")
    assert [(each.place, each.stored, each.computed) for each in found] == [
        ("tokens/optimizer.safetensors", "no files", "files"),
        ("tokens/note[1].txt", "4 bytes", "no such file"),
    ]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([*DAMAGED]), st.floats(0, 1), st.integers(1, 255))
def test_any_byte_may_be_another_one(name: str, where: float, change: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        of_rollouts(Path(folder), lambda columns: None)
        content = bytearray((path := Path(folder) / "stored" / name).read_bytes())
        content[int(where * (len(content) - 1))] ^= change
        path.write_bytes(content)
        compare_artifacts(Path(folder) / "stored", Path(folder) / "computed")

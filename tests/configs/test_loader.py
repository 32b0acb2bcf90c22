"""YAML and overrides -> a configuration, or every mistake at once with its path, the value found and what would do."""

import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import as_config, check_config, read_config, read_rewards_file
from configs.schema import ROLLOUTS
from configs.yaml_files import parse_yaml, yaml_value
from grpo_core.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]
MINIMAL = """
run: {name: mine, iterations: 2}
policy: {kind: glm_image, model: somewhere}
data: {prompts: prompts.txt}
rollout: {height: 64, width: 64}
rewards:
  - reward: jpeg
    settings: {direction: compressible}
"""


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_what_is_written_as_yaml_is_read_as_it_was(value: object) -> None:
    assert parse_yaml(yaml_value(value), "here") == value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def problems(file: Path, *overrides: str) -> dict[str, InputError]:
    with pytest.raises(InputError) as caught:
        read_config(file, overrides)
    return {error.place: error for error in caught.value.errors}


def paths_of(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from paths_of(each, (*path, key))


def value_at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


class TestValues:
    def test_defaults_and_overrides(self, file: Path) -> None:
        overrides = ["update.learning_rate=1", "update.learning_rate=3e-4", "update.parity.max_difference=0.5"]
        overrides += ["rewards.0.weight=2.0", "policy.lora=null", "policy.dtype=float32", "data.prompts=a=b.txt"]
        config = read_config(file, overrides)
        assert config.update.learning_rate == 3e-4
        assert config.update.parity.max_difference == 0.5
        assert config.data.prompts == "a=b.txt"
        assert config.rewards[0].settings == {"direction": "compressible"}
        assert config.rewards[0].weight == 2.0
        assert config.policy.lora is None
        assert config.rollout.group_size == 8
        assert config.update.betas == (0.9, 0.999)

    def test_what_is_left_out_has_its_default(self, file: Path) -> None:
        rewards = "rewards=[{reward: jpeg, weight: 2.0}, {reward: clip_score}, {reward: sharpness}]"
        left_out = ["~update.num_iterations", "~rewards.1", "~rewards.0.weight", "~rollout.width", "rollout.width=32"]
        config = read_config(file, [rewards, "update={epochs: 3}", *left_out])
        assert config.update.epochs == 1
        assert [(each.reward, each.weight) for each in config.rewards] == [("jpeg", 1.0), ("sharpness", 1.0)]
        assert config.rollout.size.width == 32

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1e-5", 1e-5),
            ("2E3", 2000.0),
            ("-1.5e+2", -150.0),
            ("5.0e-5", 5e-5),
            *((text, text) for text in ("1e5x", "e5", "v1e")),
            ("'1e-5'", "1e-5"),
        ],
    )
    def test_exponents_are_numbers_and_text_stays_text(self, text: str, value: object) -> None:
        assert parse_yaml(text, "x") == value


class TestMistakes:
    def test_all_are_reported_at_once(self, file: Path) -> None:
        found = problems(file, "rollout.group_size=1", "run.iteration=3", "update.kl_coef=-1", "policy.dtype=float8")
        assert set(found) == {"rollout.group_size", "run.iteration", "update.kl_coef", "policy.dtype"}
        assert found["rollout.group_size"].value == 1
        assert "Did you mean run.iterations?" in found["run.iteration"].hint
        assert "float32 or bfloat16" in found["policy.dtype"].hint

    def test_wrong_options_are_reported_together(self, file: Path) -> None:
        with pytest.raises(InputError) as caught:
            read_config(file, ["run", "data.prompts.x=1", "rewards.7.weight=1", "learning_rate=1", "update.epochs=0"])
        assert [error.place for error in caught.value.errors] == ["--set"] * 3 + ["update.epochs", "learning_rate"]

    @pytest.mark.parametrize("override", ["~rollout.heigth", "~rollout.height=64", "~rewards.1", "~", "~update.epochs"])
    def test_only_a_key_that_is_there_is_left_out(self, file: Path, override: str) -> None:
        assert (problems(file, override)["--set"].value) == override

    @pytest.mark.parametrize("algorithm", ["nft", "awm", "v_grpo", "ram"])
    def test_hints_about_the_file_name_the_option_that_follows_them(self, algorithm: str) -> None:
        file = REPOSITORY / "configs" / "tiny_sd3.yaml"
        changes = [f"update.algorithm={algorithm}", "rollout.sde_window_size=0"]
        # Keys that there are not are refused before those that contradict each other.
        for _ in range(2 if algorithm in ("nft", "ram") else 1):
            found = problems(file, *changes)
            changes += [option for each in found.values() for option in re.findall("--set '([^']+)'", each.hint)]
        config = read_config(file, changes)
        assert next(iter(config.updates.values())).algorithm == algorithm
        # What another option gives is not the file's.
        given = problems(REPOSITORY / "configs" / "tiny_sd3_nft.yaml", "rollout.sde_window_range=[0, 6]")
        assert "--set" not in given["rollout.sde_window_range"].hint

    def test_missing_sections(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.yaml"
        path.write_text("run: {name: x, iterations: 1}\n")
        assert set(problems(path)) == {"policy", "data", "rollout", "rewards"}
        path.write_text("")
        (error,) = problems(path).values()
        assert "mapping with the sections" in error.hint

    @pytest.mark.parametrize(
        ("override", "place"),
        [
            ("run.iterations='3'", "run.iterations"),
            ("run.iterations=true", "run.iterations"),
            ("run.iterations=2.0", "run.iterations"),
            ("run.iterations=null", "run.iterations"),
            ("update.learning_rate=.inf", "update.learning_rate"),
            ("update.learning_rate=0", "update.learning_rate"),
            ("rewards.0.weight=.nan", "rewards.0.weight"),
            ("rewards=[]", "rewards"),
            ("run.name=a/b", "run.name"),
            ("run.name=.hidden", "run.name"),
            ("update.clip_range=1.0", "update.clip_range"),
            ("update.betas=[0.9, 1.0]", "update.betas.1"),
            ("advantages.baseline=median", "advantages.baseline"),
            ("advantages.scale=groups", "advantages.scale"),
            ("advantages.missing=one", "advantages.missing"),
            ("advantages.constant_groups=skip", "advantages.constant_groups"),
            ("advantages.kl_estimator=k4", "advantages.kl_estimator"),
            ("update.betas=[-0.1, 0.9]", "update.betas.0"),
        ],
    )
    def test_values_that_will_not_do(self, file: Path, override: str, place: str) -> None:
        assert set(problems(file, override)) == {place}

    def test_every_key_of_another_type_is_refused_by_its_own_place(self, file: Path) -> None:
        """By the file's path, whatever types are allowed there, and in the words of YAML, not of pydantic."""
        more = ["rewards.0.where={kind: [a]}", "data.prompt_column=a", "run.keep_policies={}"]
        values = read_config(file, more).model_dump(mode="json")
        every = list(paths_of(values))
        plain = [path for path in every if not isinstance(value_at(values, path), dict | list)]
        # Several plain keys at once for what is wrong alone; each key for what other keys are compared with.
        for wrong in (1.5, "text", True, [[None]]):
            self._refused(dict.fromkeys(plain, wrong), values)
        for path in every:
            for wrong in ([[None]], {"x": [1]}, 10**30):
                if path not in plain or wrong == 10**30:
                    self._refused({path: wrong}, values)
        assert set(problems(file, "rewards.0.where.x=1")) == {"rewards.0.where.x"}
        assert set(problems(file, "data.prompt_column={user: 1}")) == {"data.prompt_column.user"}

    def _refused(self, changes: dict[tuple[Any, ...], object], values: dict[str, Any]) -> None:
        changed = deepcopy(values)
        for path, wrong in changes.items():
            value_at(changed, path[:-1])[path[-1]] = wrong
        try:
            check_config(changed)
        except InputError as error:
            for each in error.errors:
                assert "[" not in each.place, changes
                assert not re.match("Input should|Tuple|String|Dict|Value", each.hint), (changes, each.hint)

    def test_key_that_stands_twice_names_the_line(self, file: Path) -> None:
        file.write_text(MINIMAL + "data: {prompts: other.txt}\n")
        (error,) = problems(file).values()
        assert error.place == f"{file}, line {len(MINIMAL.splitlines()) + 1}"

    def test_broken_yaml_names_the_line(self, file: Path) -> None:
        file.write_text("run: {name: x\npolicy: y\n")
        (error,) = problems(file).values()
        assert error.place.startswith(f"{file}, line ")

    @pytest.mark.parametrize(
        ("text", "line"), [("run: [1,\n", 2), ("run: [1,", 1), ("run: {a: 'x\n\n", 3), ("? [a]\n: b\n", 1)]
    )
    def test_open_brackets_and_keys_that_are_no_names_name_the_line(self, file: Path, text: str, line: int) -> None:
        file.write_text(text)
        (error,) = problems(file).values()
        assert error.place == f"{file}, line {line}"
        assert error.hint

    def test_python_tags_are_not_run(self, file: Path, tmp_path: Path) -> None:
        file.write_text(f"run: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
        problems(file)
        assert not (tmp_path / "made").exists()

    def test_aliases_that_repeat_each_other_are_counted_and_not_made(self, tmp_path: Path) -> None:
        """Nine lines of nine aliases of the line before: 9^9 texts, and (9^9 - 1) / 8 lists above them."""
        lines = ["a0: &a0 [" + ",".join(9 * "x") + "]"]
        lines += [f"a{n}: &a{n} [" + ",".join(9 * [f"*a{n - 1}"]) + "]" for n in range(1, 9)]
        (error,) = problems(self._written(tmp_path, "\n".join([*lines, "run: *a8"]))).values()
        assert error.place == f"{tmp_path}/mine.yaml"
        # Of run and of each line: the lists, their texts, and the key; and the file itself.
        sizes = [sum(9**depth for depth in range(n + 2)) for n in (*range(9), 8)]
        assert error.value == f"{1 + sum(1 + size for size in sizes):,} values"

    def test_a_few_aliases_are_read(self, file: Path) -> None:
        assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]", "here") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}

    def test_values_that_are_nested_too_deeply(self, tmp_path: Path) -> None:
        (error,) = problems(self._written(tmp_path, "run: " + 1000 * "[" + 1000 * "]")).values()
        assert error.place == f"{tmp_path}/mine.yaml"
        assert len(str(error)) < 200

    @pytest.mark.parametrize(
        "value",
        [
            *("2001-99-99", "2001-01-01 00:00:00 +99:99", "!!timestamp a", "!!bool a", "!!float a", "!!float ''"),
            *("!!int a", "!!int _", "!!int 09", "1" * 5000, "0x" + "f" * 5000),
        ],
    )
    def test_values_that_are_none_of_their_kind(self, value: str) -> None:
        with pytest.raises(InputError) as caught:
            parse_yaml(f"run:\n  name: {value}\n", "here")
        assert caught.value.place == "here, line 2"

    def test_an_escape_beyond_all_letters(self) -> None:
        with pytest.raises(InputError, match="no letter"):
            parse_yaml('a: "\\UFFFFFFFF"', "here")

    def _written(self, folder: Path, text: str) -> Path:
        (folder / "mine.yaml").write_text(text)
        return folder / "mine.yaml"

    @pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
    def test_unreadable_file(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "mine.yaml"
        if content is not None:
            path.write_bytes(content)
        (error,) = problems(path).values()
        assert (error.place, error.value) == ("CONFIG", str(path))

    def test_only_a_file_of_the_same_sections_is_meant_by_a_wrong_name(self, tmp_path: Path, file: Path) -> None:
        (tmp_path / "mint.yaml").write_text("rewards: [{reward: jpeg}]\n")
        (tmp_path / "mind.yaml").write_text("name: a deployment\n")
        (tmp_path / "minx.yaml").write_text("[: no YAML")
        wrong = tmp_path / "minn.yaml"
        read_rewards = partial(read_rewards_file, place="--rewards")
        for read, meant in ((read_config, file), (read_rewards, tmp_path / "mint.yaml")):
            with pytest.raises(InputError) as caught:
                read(wrong)
            assert re.findall(r"Did you mean (\S+)\?", caught.value.hint) == [str(meant)]

    def test_folder_for_a_file(self, tmp_path: Path) -> None:
        assert set(problems(tmp_path)) == {"CONFIG"}

    @pytest.mark.parametrize(
        ("override", "place"),
        [
            ("data.prompts=http://me:HIDDEN@host/p.jsonl", "data.prompts"),
            ("data.targets=https://hf_HIDDEN@host/images", "data.targets"),
            ("evaluate.datasets=[{name: a, prompts: 's3://KEY:HIDDEN@b/p'}]", "evaluate.datasets.0.prompts"),
            ("rewards=[{reward: remote, settings: {url: 'http://me:HIDDEN@host'}}]", "rewards.0.settings.url"),
            ("guardrails.rewards=[{reward: judge, settings: {url: 'http://:HIDDEN@host/v1'}}]", None),
            ("policy.model=https://me:HIDDEN@host/model", "policy.model"),
            ("policy={model: 'https://me:HIDDEN@host/model'}", "policy.model"),
            ("storage.root=s3://KEY:HIDDEN@bucket/runs", "storage.root"),
            ("storage.rooot=s3://KEY:HIDDEN@bucket/runs", "storage.rooot"),
        ],
    )
    def test_an_address_with_a_secret_anywhere(self, file: Path, override: str, place: str | None) -> None:
        found = problems(file, override)
        assert list(found) == [place or "guardrails.rewards.0.settings.url"]
        assert "***@" in str(next(iter(found.values())).value)
        assert "HIDDEN" not in str(found)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("tiny-glm-image", "glm_image"),
        ("tiny-sd3", "diffusers"),
        ("tiny-text", "causal_lm"),
        ("tiny-vision", "vision_lm"),
    ],
)
def test_a_policy_without_a_kind_is_what_its_model_is(file: Path, model: str, kind: str) -> None:
    """So are the sections that depend on it, in a configuration of Python too, and once written out it is named."""
    changes = [f"policy={{model: data/models/{model}}}", "rewards=[{reward: jpeg}]"]
    if kind == "diffusers":
        changes += ["rollout={height: 64, width: 64, num_inference_steps: 9, guidance_scale: 1.0}"]
    if kind.endswith("_lm"):
        changes = [changes[0], "rewards=[{reward: format}]", "rollout={max_completion_length: 3}"]
    config = read_config(file, changes)
    assert (config.policy.kind, type(config.rollout)) == (kind, ROLLOUTS[config.policy.kind])
    assert as_config(config.model_dump(mode="json")) == read_config(file, [*changes, f"policy.kind={kind}"]) == config


@pytest.mark.parametrize(
    ("model", "place", "words"),
    [
        ("someone/model", "policy.kind", "causal_lm"),
        ("./nowhere", "policy.model", "no such folder"),
        ("data/models/nowhere", "policy.model", "no such folder"),
        ("data/prompts", "policy.model", "model_index.json"),
    ],
)
def test_a_kind_that_cannot_be_read_is_asked_for(file: Path, model: str, place: str, words: str) -> None:
    """Alone: which other keys there are depends on it."""
    found = problems(file, f"policy={{model: {model}}}", "rollout.nothing=1")
    assert list(found) == [place]
    assert words in found[place].hint

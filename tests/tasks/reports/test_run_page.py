import base64
import hashlib
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from grpo_core.rollouts.messages import write_messages
from tasks.reports import report as pages
from tasks.reports.groups import LARGE, read_groups
from tasks.reports.images import PromptImages
from tasks.reports.run_page import PageSamples, progress, read_excerpts, read_heldout, read_rewards, render_run_page
from tasks.reports.text import visible
from tasks.runs.hacking import hacking_verdict
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import RunMaker, colour, png, whole_run

MEASURED = "rewards: [{reward: ssim, weight: 0}]\n"
TRAINED = "rewards: [{reward: ssim, weight: 1}]\n"
STOPPED = "guardrails: {on_fall: stop}\n"
RISES = (-0.2, -0.2, -0.2, 0.4, 0.4, 0.4)
FALLS, STAYS = (0.8, 0.8, 0.8, 0.4, 0.4, 0.4), (0.8, 0.81, 0.8, 0.8, 0.81, 0.8)


@pytest.mark.parametrize(
    ("settings", "rewards", "guardrail", "finding", "said"),
    [
        ("", (), (), "unknown", "no policy was evaluated"),
        (TRAINED, RISES, (), "unknown", "every held-out measure is trained on"),
        ("", RISES[:3], FALLS[:3], "unknown", "3 of the 4 evaluations"),
        ("", RISES, FALLS, "signs", "jpeg fell from 0.8 to 0.4 (-50%) and has been low since policy 3"),
        ("", RISES, STAYS, "none", "jpeg: 0.8 with policy 0, 0.8 with policy 5"),
        ("", RISES[::-1], FALLS, "none", "held-out reward: 0.9 with policy 0, 0.3 with policy 5"),
        (MEASURED, RISES, (), "none", "ssim: 0.3 with policy 0, 0.9 with policy 5"),
        (STOPPED, RISES, FALLS, "signs", "the run was stopped for it"),
        ("guardrails: {fall: 0.6}\n", RISES, FALLS, "none", "jpeg: 0.8 with policy 0"),
        ("guardrails: {fall: 7}\n", RISES, FALLS, "unknown", "guardrails.fall"),
    ],
)
def test_what_is_not_trained_on_decides(
    tmp_path: Path, settings: str, rewards: tuple[float, ...], guardrail: tuple[float, ...], finding: str, said: str
) -> None:
    maker = RunMaker(tmp_path, settings=settings, prompts=("one",))
    for version, shift in enumerate(rewards):
        maker.evaluation(version, shift=shift)
    for version, mean in enumerate(guardrail):
        maker.guardrail(version, "jpeg", mean)
    verdict = hacking_verdict(read_run(RunReader(maker.store)))
    assert verdict.finding == finding
    assert any(said in reason for reason in verdict.reasons), verdict.reasons
    if finding == "none":
        assert verdict.summary == ("no sign in the guardrail jpeg" if guardrail else "no sign in ssim (weight 0)")


EVIL = """<script>alert("1")</script> " onload='x' {{ 'ran' * 3 }} </title></pre> &amp; \u202e"""
_VOID = {"meta", "img", "br", "input"}
PAGE_SCRIPT = Path(pages.__file__).parent / "templates" / "page.js"


class Page(HTMLParser):
    """The page as a browser builds it: elements with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_offline(html: str) -> Page:
    """Its script is ours, it has no reference to anything outside, and every element is closed."""
    page = Page(html)
    assert page.open == []
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script == PAGE_SCRIPT.read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    html = html.replace(script, "")
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                assert re.match(r"data:image/webp;base64,|#", value or ""), (tag, name, (value or "")[:40])
    assert not re.search(r"url\(|@import|https?:", html)
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in page.named("meta"))
    return page


def images(page: Page) -> list[Image.Image]:
    sources = [attributes["src"] or "" for attributes in page.named("img")]
    return [Image.open(io.BytesIO(base64.b64decode(source.split(",", 1)[1]))) for source in sources]


def page_of(maker: RunMaker, warnings: tuple[str, ...] = ()) -> str:
    reader, targets = RunReader(maker.store), PromptImages(LARGE, maker.store)
    run = read_run(reader)
    samples = PageSamples(
        groups=read_groups(reader, run.shown.stages if run.shown else {}, maker.folder, targets, limit=50),
        heldout=read_heldout(reader, run, maker.folder, targets, limit=50),
        rewards=read_rewards(reader, run, maker.folder),
        excerpts=read_excerpts(reader, run, maker.folder, targets),
    )
    return render_run_page(run, samples, hacking_verdict(run), warnings)


def test_images_of_prompts_stand_in_front_of_the_samples(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.sources = {0: [png((9, 8, 7)), png((7, 8, 9))]}
    for version in (0, 1):
        maker.evaluation(version, shift=0.1 * version)
    maker.iteration(1)
    shown = images(page := check_offline(page_of(maker)))
    colours = [each.convert("RGB").getpixel((0, 0)) for each in shown]
    # Of the held-out prompt and of the iteration's.
    assert [place for place, each in enumerate(colours) if each == (9, 8, 7)] == [
        place - 1 for place, each in enumerate(colours) if each == (7, 8, 9)
    ]
    assert colours.count((9, 8, 7)) == 2
    assert "".join(page.text).count("source") >= 4


def test_the_numbers_of_a_run_stand_in_a_page_that_opens_offline(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    for version, mean in ((0, 0.5), (2, 0.125)):
        maker.guardrail(version, "<b>jpeg", mean)
    page = check_offline(page_of(maker))
    labels = {svg["aria-label"] for svg in page.named("svg")}
    assert {"Reward over iterations", "Guardrails over iterations", "ssim: mean over iterations"} <= labels
    # Each point says its value when pointed at.
    points = "".join(page.text)
    for said in (
        "reward, iteration 2: 0.6",
        "held-out reward, iteration 0: 0.5",
        "KL to the reference, iteration 2: 0.02",
        "<b>jpeg, iteration 2: 0.125",
    ):
        assert said in points
    # The table has every metric by its name, next to its value.
    cells = [text.strip() for text in page.text]
    for name, value in (("heldout_reward", "0.75"), ("kl", "0.02"), ("rewards/ssim/mean", "0.6"), ("step_time", "10")):
        assert cells[cells.index(name) + 1] == value


def test_both_streams_have_curves_advantages_and_logprobs(tmp_path: Path) -> None:
    maker = whole_run(tmp_path, streams=("tokens", "denoising"))
    page = check_offline(page_of(maker))
    labels = {svg["aria-label"] for svg in page.named("svg")}
    assert {"reward, denoising over iterations", "spread within groups, denoising over iterations"} <= labels
    text = "".join(page.text)
    for said in (
        "reward, denoising, iteration 2: 0.35",
        "held-out reward, denoising, iteration 2: 0.5",
        "Other images of a token sample",
        "log-prob, steps 2 to 3",
        "1.2500, -0.5000",
        "advantage, tokens",
    ):
        assert said in text
    titles = [image.get("title") or "" for image in page.named("img")]
    further = next(title for title in titles if title.startswith("i000002.p0000.s03: reward 0.800"))
    assert "advantage, denoising +0.60; log-prob -0.8 over 2 tokens; log-prob, steps 2 to 3 1.2500" in further


def test_a_run_without_tokens_has_a_page(tmp_path: Path) -> None:
    text = "".join(check_offline(page_of(whole_run(tmp_path, streams=("denoising",)))).text)
    assert "log-prob, steps 2 to 3" in text
    assert "noisy steps that other weights sampled are weighted" in text
    assert "log-prob -0.8" not in text


def test_prompts_warnings_and_configuration_are_data(tmp_path: Path) -> None:
    maker = whole_run(tmp_path, prompts=(EVIL, "plain"))
    maker.store.write_file("config.yaml", ("run: {iterations: 2}\n# " + EVIL).encode())
    maker.store.quarantine(["run.json"], reason=EVIL)
    text = "".join(check_offline(page_of(maker, warnings=(EVIL,))).text)
    # The group, the held-out pair, the excerpt of iteration 1, the configuration, what was moved, the warning.
    assert text.count(visible(EVIL)) == 6
    assert "\u202e" not in text
    assert "ranranran" not in text


def test_every_image_is_there_to_the_pixel(tmp_path: Path) -> None:
    target = tmp_path / "target.png"
    target.write_bytes(png((201, 202, 203)))
    maker = RunMaker(tmp_path / "runs", prompts=("one",))
    maker.targets = {0: target}
    maker.iteration(1)
    found = [image.convert("RGB").getpixel((0, 0)) for image in images(Page(page_of(maker)))]
    strip = [colour(0, sibling) for sibling in (2, 0, 1, 3)]
    assert found == [colour(0, 2), colour(0, 1), (201, 202, 203), *strip]


def test_the_same_seed_is_shown_over_the_versions(tmp_path: Path) -> None:
    maker = whole_run(tmp_path, prompts=("one",))
    for version in (4, 6):
        maker.evaluation(version, shift=0.0)
    page = check_offline(page_of(maker))
    titles = [attributes.get("title") or "" for attributes in page.named("img")]
    shown = [title for title in titles if title.startswith("policy ") and ".s02:" in title]
    versions = {0: 0.9, 2: 1.15, 4: 0.9, 6: 0.9}
    assert shown == [f"policy {version}, heldout.p0000.s02: {reward:.3f}" for version, reward in versions.items()]
    # The prompt's siblings with a reward had 0.4, 0.1 and 0.9, and 0.1 more an iteration later.
    assert "mean reward in iteration 1: 0.467, 2: 0.567" in " ".join("".join(page.text).split())


def test_images_beyond_the_limit_are_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = whole_run(tmp_path)
    everything = len(images(Page(page_of(maker))))
    monkeypatch.setattr(pages, "MAX_BYTES", 1000)
    page = check_offline(page_of(maker))
    assert sum(len(attributes["src"] or "") for attributes in page.named("img")) <= 1000
    left_out = "".join(page.text).count("left out: this page is full")
    assert len(images(page)) + left_out == everything
    assert left_out > 0
    texts = RunMaker(tmp_path, "texts", modality="text", prompts=("one",))
    texts.written = {(0, 2): "long " * 400}
    texts.iteration(1)
    assert "the rest is left out: this page is full" in page_of(texts)
    assert len(page_of(texts)) < len(page_of(maker))


@pytest.mark.parametrize("seed", [0, 1000])
def test_whether_versions_were_sampled_with_the_same_seeds(tmp_path: Path, seed: int) -> None:
    maker = RunMaker(tmp_path)
    maker.evaluation(0, shift=0.0)
    maker.evaluation(1, shift=0.1, seed=seed)
    reader = RunReader(maker.store)
    heldout = read_heldout(reader, read_run(reader), maker.folder, PromptImages(LARGE), limit=50)
    assert heldout.same_seeds == (seed == 0)


def test_a_run_with_nothing_yet_has_a_page(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    assert not check_offline(page_of(maker)).named("svg")
    maker.rollouts("iteration_000001", "i000001")
    text = "".join(check_offline(page_of(maker)).text)
    assert "unrated" in text
    assert "iteration 1 has rollouts" in text


def test_a_conversation_is_shown_as_lines_of_its_roles(tmp_path: Path) -> None:
    talk = write_messages([{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}])
    maker = RunMaker(tmp_path, modality="text", prompts=(talk, "plain"))
    maker.iteration(1)
    text = "".join(check_offline(page_of(maker)).text)
    assert "system: be brief\nuser: 2+2?" in text
    assert "content" not in text


def test_texts_are_shown_in_full_and_as_data(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text", prompts=("ask " + EVIL, "plain"))
    long = "begin " + "word\n" * 400 + EVIL
    maker.written = {(0, 2): long, (0, 1): EVIL, (1, 0): "", (0, 0): "<table><tr><td>|\x1b"}
    maker.iteration(1)
    page = check_offline(page_of(maker))
    assert not page.named("img")
    text = "".join(page.text)
    assert "ranranran" not in text
    assert text.count(visible(long)) == 2  # among the ends and among all siblings
    assert text.count("<table><tr><td>|⟨U+001B⟩") == 1
    assert "image" not in text.lower().split("kept in")[0]
    assert {"best", "worst"} <= {attributes.get("class") for attributes in page.named("figure")}


def test_a_long_prompt_of_images_is_folded(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, prompts=("draw " * 2000 + EVIL, "plain"))
    maker.iteration(1)
    page = check_offline(page_of(maker))
    folded = [attributes for attributes in page.named("details") if attributes.get("class") == "excerpt"]
    assert len(folded) == 1
    text = "".join(page.text)
    assert text.count(visible("draw " * 2000 + EVIL)) == 1


def test_rounds_datasets_and_dropped_groups_are_counted(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text", datasets=("sums", "<b>poems"))
    maker.iteration(1, rounds=2)
    text = "".join(Page(page_of(maker)).text)
    assert "4 groups in 2 sampling rounds, 2 without spread" in text
    assert text.count("all the same: left out of the update") == 2
    assert "<b>poems, iteration 1: 0.6" in text
    alone = page_of(whole_run(tmp_path, "one"))
    assert "by dataset" not in alone


def test_truncated_completions_are_marked_wherever_they_are_shown(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path, modality="text"))
    shown = re.findall(r"answer (\d) of group \d</div>\s*(<span class=\"soft\">\(truncated\))?", page)
    assert {sibling: bool(mark) for sibling, mark in shown} == {"0": False, "1": True, "2": False, "3": False}
    # Of each prompt a worst sample, one of all siblings, held out before and after, over the policies and iterations.
    assert sum(sibling == "1" for sibling, _ in shown) >= 2 * 5
    assert all(bool(mark) == (sibling == "1") for sibling, mark in shown)
    assert len(shown) == page.count("of group ")


@pytest.mark.parametrize(("rounds", "stages"), [(1, "2 has rollouts, rewards"), (2, "2, sampling round 2, has")])
def test_the_progress_of_a_run(tmp_path: Path, rounds: int, stages: str) -> None:
    maker = RunMaker(tmp_path, planned=3)
    maker.iteration(1)
    maker.rollouts("iteration_000002", "i000002")
    maker.rewards("iteration_000002", "i000002")
    if rounds > 1:
        maker.rollouts("iteration_000002/round_02", "i000002.d02")
    said = progress(read_run(RunReader(maker.store)))
    assert said.startswith("unfinished")
    assert f"1 of 3 iterations; iteration {stages}" in said
    assert progress(read_run(RunReader(whole_run(tmp_path, "b").store))) == "finished: 2 iterations"

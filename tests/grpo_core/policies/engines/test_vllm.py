"""Rows that a server fails to answer are asked for again with their own seeds; answers that are not theirs are refused.

What a real server answers is tested by `make test-engines`; the one here exists for its failures.
"""

import base64
import datetime
import ipaddress
import math
import random
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.engines import vllm
from grpo_core.policies.engines.settings import server_command
from grpo_core.policies.engines.vllm import EngineError, VllmEngine
from grpo_core.policies.engines.vllm_checks import Needs, server_problems
from grpo_core.policies.engines.vllm_requests import prompt_ids_of, served_prompts
from grpo_core.policies.engines.vllm_server import Adapter, Server, find_server
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.records import SampledTokens
from grpo_core.services import Service, ServiceError, run_awaitable
from tests.grpo_core.policies.vision_lm.tiny_families import PROMPTS as QUESTIONS
from tests.grpo_core.policies.vision_lm.tiny_families import SOURCES, make_policy
from tests.grpo_core.rewards.stub import Asked, Reply, Stub, serve
from tests.tiny_policies import TEXT_PROMPTS, build_text_policy

PROMPTS, SIBLINGS, LENGTH = TEXT_PROMPTS[:3], 4, 8
SEEDS = [7_000_000_000 + place for place in range(len(PROMPTS) * SIBLINGS)]
ADAPTER = Adapter("grpo-mine-" + "a" * 64, "/adapters/a")
END = 268


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "BACKOFF_S", 1e-4)


@pytest.fixture(scope="module")
def policy() -> CausalLMPolicy:
    return build_text_policy(CausalLMSettings(max_completion_length=LENGTH, temperature=0.7))


def answered(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as vLLM does, with tokens that depend on the prompt and the seed alone."""
    drawn = random.Random(f"{body['prompt']} {body['seed']}")
    ids = [drawn.randrange(97, 123) for _ in range(drawn.randint(2, LENGTH))]
    finished = len(ids) < LENGTH
    if finished:
        ids[-1] = END
    logprobs = [-drawn.random() for _ in ids]
    choice = {
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "finish_reason": "stop" if finished else "length",
        "logprobs": {"token_logprobs": logprobs, "top_logprobs": None},
    }
    return {"model": body["model"], "choices": [choice]}


class Vllm:
    """A server that fails as a test says, and remembers what it was asked and has loaded."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.asked, self.loaded = stub, list[dict[str, Any]](), dict[str, str]()
        self.fail: Callable[[dict[str, Any], int], Reply | None] = lambda body, number: None
        self.lock = threading.Lock()
        stub.respond = self.respond

    def respond(self, requested: Asked) -> Reply:
        body = requested.body
        match requested.path:
            case "/version":
                return Reply({"version": "0.32.0"})
            case "/v1/models":
                adapters = [{"id": name, "root": root, "parent": "base"} for name, root in self.loaded.items()]
                return Reply({"data": [{"id": "base", "root": "/m", "parent": None, "max_model_len": 64}, *adapters]})
            case "/v1/load_lora_adapter":
                self.loaded[body["lora_name"]] = body["lora_path"]
                return Reply(b"Success")
            case "/v1/unload_lora_adapter":
                return Reply(b"Success") if self.loaded.pop(body["lora_name"], None) else Reply({}, 404)
        with self.lock:
            self.asked.append(body)
            number = len(self.asked)
        if body["model"] not in ("base", *self.loaded):
            return Reply({"error": {"message": "The model does not exist"}}, 404)
        return self.fail(body, number) or Reply(answered(body))

    def server(self) -> Server:
        return run_awaitable(find_server(Service(self.stub.url, 5.0, None, "rollout.vllm")))


@pytest.fixture
def served() -> Iterator[Vllm]:
    with serve() as stub:
        yield Vllm(stub)


def sample(policy: CausalLMPolicy, *servers: Server, adapter: Adapter | None = None) -> SampledTokens:
    policy.engine = VllmEngine(lambda: servers, adapter, concurrency=3)
    try:
        return policy.sample_tokens(PROMPTS, SIBLINGS, SEEDS)
    finally:
        policy.engine = None


def test_each_row_is_one_request_with_its_own_seed(policy: CausalLMPolicy, served: Vllm) -> None:
    sampled = sample(policy, served.server())
    assert sorted(body["seed"] for body in served.asked) == SEEDS
    # Nothing is left to the defaults of the server, or of the model that it serves.
    stated = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "repetition_penalty": 1.0}
    assert all(body[name] == value for body in served.asked for name, value in stated.items())
    by_seed = {body["seed"]: answered(body)["choices"][0] for body in served.asked}
    for row, seed in enumerate(SEEDS):
        count = int(sampled.actions.loss_mask[row].sum())
        assert sampled.actions.token_ids[row, :count].tolist() == by_seed[seed]["token_ids"]
        expected = torch.tensor(by_seed[seed]["logprobs"]["token_logprobs"])
        assert torch.equal(sampled.rollout_logprobs[row, :count], expected)
        assert bool(sampled.finished[row]) == (by_seed[seed]["token_ids"][-1] == END)


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], Reply]:
    def reply(body: dict[str, Any]) -> Reply:
        answer = answered(body)
        change(answer["choices"][0])
        return Reply(answer)

    return reply


def test_rows_without_a_usable_answer_are_asked_for_again(policy: CausalLMPolicy, served: Vllm) -> None:
    undisturbed = sample(policy, served.server())
    failures: dict[str, Callable[[dict[str, Any]], Reply]] = {
        "5xx": lambda body: Reply({}, 503),
        "busy": lambda body: Reply({}, 429),
        "hangs up": lambda body: Reply(drop=True),
        "no choices": lambda body: Reply({"model": body["model"], "choices": []}),
        "NaN": broken(lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, None)),
        "a log-prob less": broken(lambda choice: choice["logprobs"]["token_logprobs"].pop()),
        "cut": broken(lambda choice: choice.update(token_ids=[97], logprobs={"token_logprobs": [-1.0]})),
        "aborted": broken(lambda choice: choice.update(token_ids=[], logprobs={"token_logprobs": []})),
    }
    for failure in failures.values():
        served.asked.clear()
        served.fail = lambda body, number, failure=failure: failure(body) if number % 3 == 1 else None
        sampled = sample(policy, served.server())
        assert torch.equal(sampled.actions.token_ids, undisturbed.actions.token_ids)
        assert torch.equal(sampled.rollout_logprobs, undisturbed.rollout_logprobs)
        assert len(SEEDS) < len(served.asked) < 3 * len(SEEDS)


def test_a_server_that_never_answers_is_named(policy: CausalLMPolicy, served: Vllm) -> None:
    server = served.server()
    served.fail = lambda body, number: Reply({}, 500) if body["seed"] == SEEDS[0] else None
    with pytest.raises(EngineError, match=r"1 of 12 rows") as failed:
        sample(policy, server)
    assert served.stub.url in str(failed.value)
    assert [body["seed"] for body in served.asked].count(SEEDS[0]) == vllm.ATTEMPTS
    assert len(served.asked) == len(SEEDS) + vllm.ATTEMPTS - 1


def test_servers_share_prompts_and_answer_for_each_other(
    policy: CausalLMPolicy, served: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = sample(policy, served.server())
    with serve() as stub:
        second = Vllm(stub)
        servers = served.server(), second.server()
        served.asked.clear()
        assert torch.equal(sample(policy, *servers).actions.token_ids, alone.actions.token_ids)
        asked = [{tuple(body["prompt"]) for body in each.asked} for each in (served, second)]
        assert not asked[0] & asked[1]
        assert [len(prompts) for prompts in asked] == [2, 1]
    # The second one is gone, and the first is asked next.
    monkeypatch.setattr(vllm, "ATTEMPTS", 2)
    assert torch.equal(sample(policy, *servers).rollout_logprobs, alone.rollout_logprobs)


@pytest.mark.parametrize("value", ["another", "base"])
def test_answers_of_another_model_or_to_another_prompt_are_refused(
    policy: CausalLMPolicy, served: Vllm, value: str
) -> None:
    def another(body: dict[str, Any], number: int) -> Reply:
        answer = answered(body)
        if value == "another":
            answer["model"] = value
        else:
            # Truncated, or of another tokenizer.
            answer["choices"][0]["prompt_token_ids"] = body["prompt"][1:]
        return Reply(answer)

    served.fail = another
    with pytest.raises(InputError) as refused:
        sample(policy, served.server())
    assert (refused.value.place, refused.value.value) == ("rollout.vllm.url", served.stub.url)


def test_what_a_server_refuses_is_an_error_at_once(policy: CausalLMPolicy, served: Vllm) -> None:
    for status, place in ((400, "rollout.vllm.url"), (401, "rollout.vllm.token_env")):
        served.asked.clear()
        served.fail = lambda body, number, status=status: Reply({"error": {"message": "no"}}, status)
        with pytest.raises(InputError) as refused:
            sample(policy, served.server())
        assert (refused.value.place, refused.value.value) == (place, served.stub.url)
        assert len(served.asked) <= len(SEEDS)


def test_adapters_are_loaded_by_name_and_unloaded_when_unused(policy: CausalLMPolicy, served: Vllm) -> None:
    server = served.server()
    sample(policy, server, adapter=ADAPTER)
    assert served.loaded == {ADAPTER.name: ADAPTER.path}
    assert {body["model"] for body in served.asked} == {ADAPTER.name}
    # The server was started again, or another process has unloaded it.
    served.loaded.clear()
    sample(policy, server, adapter=ADAPTER)
    assert served.loaded == {ADAPTER.name: ADAPTER.path}
    # Another folder under its name is never used.
    other = Server(server.service, "base", "/m", 64, "0.32.0")
    served.loaded = {ADAPTER.name: "/adapters/other"}
    sample(policy, other, adapter=ADAPTER)
    assert served.loaded == {ADAPTER.name: ADAPTER.path}
    later = [Adapter(f"grpo-mine-{letter * 64}", f"/adapters/{letter}") for letter in "bcd"]
    other.uses[ADAPTER.name] += 1
    for adapter in later:
        sample(policy, other, adapter=adapter)
    # One that is in use, the last and the one before it.
    assert list(served.loaded) == [ADAPTER.name, later[1].name, later[2].name]
    run_awaitable(other.unload_all())
    assert not served.loaded


def test_stop_texts_end_rows_where_the_policy_ends_them(served: Vllm) -> None:
    policy = build_text_policy(CausalLMSettings(max_completion_length=LENGTH, stop=("b",)))
    written = [policy.tokenizer.convert_tokens_to_ids(letter) for letter in "aabaa"]

    def reply(body: dict[str, Any], number: int) -> Reply:
        # Seeds of even rows get the whole text, odd ones are ended before a stop text of the policy's rule.
        early = "stop" in body and body["seed"] % 2
        ids = written[:2] if early else [*written, *[99] * (LENGTH - len(written))]
        choice = {
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "finish_reason": "stop" if early else "length",
            "logprobs": {"token_logprobs": [-0.1] * len(ids)},
        }
        return Reply({"model": body["model"], "choices": [choice]})

    served.fail = reply
    sampled = sample(policy, served.server())
    assert sampled.actions.token_ids.tolist() == [written[:3]] * len(SEEDS)
    assert sampled.finished.all()
    assert policy.decode(sampled.actions) == ["aa"] * len(SEEDS)
    assert sum("stop" not in body for body in served.asked) == len(SEEDS) // 2
    # The server looks for stop texts in a text with special tokens, as the policy does.
    assert not any(body["skip_special_tokens"] for body in served.asked if "stop" in body)


def test_the_ids_that_top_k_kept_are_stored(served: Vllm) -> None:
    policy = build_text_policy(CausalLMSettings(max_completion_length=LENGTH, top_k=2))

    def reply(body: dict[str, Any], number: int) -> Reply:
        answer = answered(body)
        choice = answer["choices"][0]
        # Two ids as likely as the second are kept with it; the others have no probability.
        kept = {f"token_id:{token}": math.log(1 / 3) for token in (5, 3, 4)} | {"token_id:9": -9999.0}
        choice["logprobs"] = {
            "token_logprobs": [math.log(1 / 3)] * len(choice["token_ids"]),
            "top_logprobs": [kept] * len(choice["token_ids"]),
        }
        return Reply(answer)

    served.fail = reply
    sampled = sample(policy, served.server())
    support = sampled.actions.support
    assert support is not None
    assert torch.equal(support.counts, 3 * sampled.actions.loss_mask.long())
    assert set(support.ids.view(-1, 3).unbind()[0].tolist()) == {3, 4, 5}
    assert all(body["top_k"] == 2 and body["logprobs"] > 2 for body in served.asked)


@pytest.fixture(scope="module")
def looker() -> VisionLMPolicy:
    return make_policy("qwen3_vl", VisionLMSettings(max_completion_length=LENGTH))


def look(policy: VisionLMPolicy, server: Server) -> SampledTokens:
    policy.engine = VllmEngine(lambda: [server], None, concurrency=3)
    try:
        return policy.sample_tokens(QUESTIONS, 2, range(2 * len(QUESTIONS)), sources=SOURCES)
    finally:
        policy.engine = None


def seen_by(looker: VisionLMPolicy) -> Callable[[dict[str, Any], int], Reply]:
    """How a server answers that reads images as the policy does."""
    known = prompt_ids_of(looker.encode(QUESTIONS, SOURCES, for_engine=True))
    marked = looker.encode(QUESTIONS, SOURCES, for_engine=True).marked or ()
    expanded = {tuple(few): many for few, many in zip(marked, known, strict=True)}

    def reply(body: dict[str, Any], number: int) -> Reply:
        if "prompt" in body:
            answer = answered(body)
            ids = answer["choices"][0]["token_ids"]
            answer["choices"][0]["token_ids"] = [looker.ends[0] if token == END else token for token in ids]
            return Reply(answer)
        content = [{"token_id": 97 + place, "logprob": -0.5 - place, "top_logprobs": []} for place in range(LENGTH)]
        choice = {
            "token_ids": [each["token_id"] for each in content],
            "finish_reason": "length",
            "logprobs": {"content": content},
        }
        read = expanded[tuple(body["token_ids"])]
        return Reply({"model": body["model"], "choices": [choice], "prompt_token_ids": read})

    return reply


def test_prompts_with_images_go_as_marks_and_the_pixels_that_the_policy_sees(
    looker: VisionLMPolicy, served: Vllm
) -> None:
    served.fail = seen_by(looker)
    sampled = look(looker, served.server())
    by_seed = {body.get("seed", body.get("sampling_params", {}).get("seed")): body for body in served.asked}
    assert sorted(by_seed) == list(range(2 * len(QUESTIONS)))
    mark = looker.placeholders.image
    for seed, body in by_seed.items():
        images = SOURCES[seed // 2]
        if not images:
            assert body["prompt"] == prompt_ids_of(looker.encode(QUESTIONS[-1:], SOURCES[-1:], for_engine=True))[0]
            continue
        assert body["token_ids"].count(mark) == len(images)
        for part, image in zip(body["content_parts"], images, strict=True):
            sent = SourceImage.of(base64.b64decode(part["url"].partition("base64,")[2])).open()
            assert sent.tobytes() == image.open().tobytes()
        # It samples from the ids over which the policy scores.
        assert set(map(int, body["sampling_params"]["logit_bias"])) >= set(looker.placeholders.ids)
        assert set(body["sampling_params"]["logit_bias"].values()) == {-100.0}
        assert sampled.actions.token_ids[seed].tolist() == [97 + place for place in range(LENGTH)]
        assert sampled.rollout_logprobs[seed].tolist() == [-0.5 - place for place in range(LENGTH)]
    assert sampled.actions.sources == tuple(images for images in SOURCES for _ in range(2))


def test_a_server_that_reads_images_otherwise_or_not_at_all_is_refused(looker: VisionLMPolicy, served: Vllm) -> None:
    reads = seen_by(looker)
    disabled = {"error": {"message": "Restart vllm serve with --enable-scale-out to enable them."}}

    def larger(body: dict[str, Any], number: int) -> Reply:
        answer = reads(body, number)
        if "prompt" not in body:
            # An image of another size has other placeholders.
            answer.body["prompt_token_ids"] = [*answer.body["prompt_token_ids"][:4], looker.placeholders.image]  # type: ignore[index]
        return answer

    def closed(body: dict[str, Any], number: int) -> Reply:
        return reads(body, number) if "prompt" in body else Reply(disabled, 403)

    for fail in (larger, closed):
        served.fail = fail
        with pytest.raises(InputError) as refused:
            look(looker, served.server())
        assert (refused.value.place, refused.value.value) == ("rollout.vllm.url", served.stub.url)
        asked = served_prompts(looker.encode(QUESTIONS[:1], SOURCES[:1], for_engine=True), [0], SOURCES[:1])[0]
        needs = Needs(context=64, top_k=0, adapter=None, prompt=asked)
        found = run_awaitable(server_problems(served.server(), needs))
        assert [(error.place, error.value) for error in found] == [("rollout.vllm.url", served.stub.url)]


def test_what_keeps_a_server_from_sampling_a_policy(served: Vllm) -> None:
    def certain(body: dict[str, Any], number: int) -> Reply:
        answer = answered(body)
        choice = answer["choices"][0]
        choice["logprobs"]["token_logprobs"] = [raw] * len(choice["token_ids"])
        return Reply(answer)

    raw, served.fail = 0.0, certain
    needs = Needs(context=64, top_k=0, adapter=ADAPTER)
    assert run_awaitable(server_problems(served.server(), needs)) == []
    assert not served.loaded
    raw = -1.5
    missing = Reply({"error": {"message": "Not Found"}}, 404)
    served.stub.respond = lambda asked: missing if "lora" in asked.path else served.respond(asked)
    found = run_awaitable(server_problems(served.server(), Needs(65, 0, ADAPTER)))
    # The context, log-probs before the temperature, and no adapters.
    assert [(error.place, error.value) for error in found] == [("rollout.vllm.url", served.stub.url)] * 3


def test_a_command_serves_the_policys_model_unless_it_names_one() -> None:
    options = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    for words, served in (
        ("vllm serve", "vllm serve M"),
        ("vllm serve --port 1", "vllm serve M --port 1"),
        ("vllm serve other --port 1", "vllm serve other --port 1"),
        ("vllm serve --model=other", "vllm serve --model=other"),
    ):
        command = server_command(words.split(), "M", "float32", revision=None, rank=None, images=None)
        assert [*command] == [*served.split(), *options]
    module = server_command(["python", "-m", "api_server"], "M", "float32", revision=None, rank=None, images=None)
    assert [*module] == ["python", "-m", "api_server", *options, "--model", "M"]


def test_a_server_that_is_gone_or_none_of_vllms(served: Vllm, free_tcp_port: int) -> None:
    closed_url = f"http://127.0.0.1:{free_tcp_port}"
    with pytest.raises(ServiceError):
        run_awaitable(find_server(Service(closed_url, 5.0, None, "rollout.vllm")))
    served.stub.respond = lambda requested: Reply({"data": []})
    with pytest.raises(InputError) as refused:
        served.server()
    assert (refused.value.place, refused.value.value) == ("rollout.vllm.url", served.stub.url)


def test_a_certificate_that_is_not_trusted_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "server.pem").write_bytes(certificate.public_bytes(pem) + plain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with HTTPServer(("127.0.0.1", 0), None) as server:  # type: ignore[arg-type]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}"
        with pytest.raises(InputError) as refused:
            run_awaitable(find_server(Service(url, 5.0, None, "rollout.vllm")))
        thread.join()
    assert (refused.value.place, refused.value.value) == ("rollout.vllm.url", url)

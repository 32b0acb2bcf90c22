"""Each kind of tiny model samples and is updated on a GPU that computes nothing, with values computed on the CPU."""

import json
from typing import Any

import pytest

from tests.stub_gpu import ratchet
from tests.stub_gpu.conftest import Program

pytestmark = pytest.mark.stub_gpu
KEPT = json.loads(ratchet.FILE.read_text())
FAMILIES = KEPT["families"]


@pytest.fixture(scope="module")
def found(run_on_stub: Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("stub_gpu") / "found.json"
    run_on_stub("families", str(file))
    return json.loads(file.read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_equal_those_on_the_cpu(found: dict[str, Any], family: str) -> None:
    assert not found[family]["failed"], "operations that the CPU could not compute"
    assert found[family]["cuda"] == pytest.approx(found[family]["cpu"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_a_step_and_a_microbatch_take_no_more_than_before(found: dict[str, Any], family: str) -> None:
    more = list(ratchet.increases(FAMILIES[family], found[family]))
    changed = "" if ratchet.versions() == KEPT["versions"] else f" (counted with {KEPT['versions']})"
    assert not more, "\n".join([f"{family}{changed}; if it has to be so: python -m tests.stub_gpu.ratchet", *more])


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_while_sampling_is_never_that_of_cudnn(found: dict[str, Any], family: str) -> None:
    """cuDNN plans anew for each shape, and a cache has another one with each token."""
    kernels = found[family]["attention"]
    assert kernels
    assert not [name for name in kernels if "cudnn" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_over_a_model_of_16_bits_are_multiplied_in_16_bits(found: dict[str, Any], family: str) -> None:
    """No other layer of these models has weights in fp32."""
    assert found[family]["exact_products"] == 0


def test_what_takes_more_is_named_with_its_line() -> None:
    kept = {"counts": {"token": {"waits": 1.0, "launches": 7.0}}, "places": {"token": {"wait: item: a.py f": 1.0}}}
    places = {"wait: item: a.py f": 1.0, "wait: item: b.py g": 1.0}
    lines = {"wait: item: a.py f": "a.py:1", "wait: item: b.py g": "b.py:2"}
    found = {"counts": {"token": {"waits": 2.0, "launches": 6.0}}, "places": {"token": places}, "lines": lines}
    assert list(ratchet.increases(kept, found)) == [
        "a token: 2 waits, 1 before",
        "    b.py:2: 1 of wait: item: b.py g, 0 before",
    ]
    found["counts"]["token"]["waits"] = 1.0
    assert not list(ratchet.increases(kept, found))


def test_every_family_is_counted(found: dict[str, Any]) -> None:
    assert found.keys() == FAMILIES.keys()

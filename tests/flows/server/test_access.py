"""Who may reach the server: nothing that would leave it open is started."""

from collections.abc import Mapping

import pytest

from flows.server.access import decide_access
from grpo_core.errors import InputError

SECRET = {"PREFECT_SERVER_API_AUTH_STRING": "admin:s3cret"}


def test_by_default_this_machine_alone_and_its_own_pages() -> None:
    access = decide_access("127.0.0.1", 4321, environment={})
    assert (access.api_url, access.auth, access.csrf) == ("http://127.0.0.1:4321/api", None, False)
    settings = access.settings()
    assert settings["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4321,http://localhost:4321"
    assert "PREFECT_SERVER_API_AUTH_STRING" not in settings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "gpu-box"])
def test_an_address_of_others_needs_authentication(host: str) -> None:
    with pytest.raises(InputError) as refused:
        decide_access(host, 4200, environment={})
    assert (refused.value.place, refused.value.value) == ("--host", host)


@pytest.mark.parametrize("variable", ["PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"])
def test_with_authentication_others_are_let_in_and_their_pages_need_a_token(variable: str) -> None:
    access = decide_access("192.168.1.7", 4200, auth=True, environment={variable: "admin:pass:word"})
    assert (access.auth, access.csrf) == ("admin:pass:word", True)
    settings = access.settings()
    assert settings["PREFECT_SERVER_API_AUTH_STRING"] == "admin:pass:word"
    assert settings["PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED"] == "true"
    assert settings["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == "http://192.168.1.7:4200"


def test_behind_a_proxy_its_address_is_told_and_ours_is_used_here() -> None:
    access = decide_access("0.0.0.0", 4200, "https://prefect.lab:8443/", auth=True, environment=SECRET)
    assert access.api_url == "https://prefect.lab:8443/api"
    assert access.own_api_url == "http://127.0.0.1:4200/api"
    assert access.settings()["PREFECT_SERVER_UI_API_URL"] == "https://prefect.lab:8443/api"
    assert "https://prefect.lab:8443" in access.settings()["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"].split(",")


def test_all_addresses_are_none_that_one_could_go_to() -> None:
    with pytest.raises(InputError, match="--url with the address"):
        decide_access("0.0.0.0", 4200, auth=True, environment=SECRET)


@pytest.mark.parametrize("url", ["prefect.lab", "ftp://prefect.lab", "http://prefect.lab/api", "http://"])
def test_an_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="--url: got"):
        decide_access("127.0.0.1", 4200, url, environment={})


@pytest.mark.parametrize("environment", [{}, {"PREFECT_SERVER_API_AUTH_STRING": ""}])
def test_authentication_without_user_and_password_is_refused(environment: Mapping[str, str]) -> None:
    with pytest.raises(InputError) as refused:
        decide_access("127.0.0.1", 4200, auth=True, environment=environment)
    assert refused.value.place == "--auth"


@pytest.mark.parametrize("secret", ["adminonly", ":secret", "admin:", "ädmin:secret"])
def test_a_secret_of_another_form_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(InputError, match="It must be USER:PASSWORD") as refused:
        decide_access("127.0.0.1", 4200, environment={"PREFECT_SERVER_API_AUTH_STRING": secret})
    assert secret not in str(refused.value)
    assert "PREFECT_SERVER_API_AUTH_STRING: got '(not shown)'" in str(refused.value)


def test_the_secret_of_an_url_is_not_shown() -> None:
    with pytest.raises(InputError) as refused:
        decide_access("127.0.0.1", 4200, "https://me:hidden@prefect.lab", environment={})
    assert "hidden" not in str(refused.value)

"""How clients reach a server: the names of its model, pages of other origins, TLS."""

import ssl
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from commands import model_folder
from serving import BODY, PATH, Running, plans_of, serving
from shell import Shell, refusal

from kvpolicy.errors import KVPolicyError
from kvpolicy.serve.plans import ServedModel
from kvpolicy.serve.server import Certificate

__all__ = ["model_folder"]

# Names of a model


def served_names(kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, *words: object) -> list[str]:
    """The ids that a command would serve."""
    found: list[ServedModel] = []

    def keep(model: ServedModel, *_: object) -> int:
        found.append(model)
        return 0

    monkeypatch.setattr("kvpolicy.serve.launch.serve_model", keep)
    answer = kvpolicy("serve", "--port", 0, "--policy", "full", *words)
    assert answer.status == 0, answer.err
    return list(found[0].by_id)


def test_a_linked_folder_is_served_under_the_name_that_was_given(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "current"
    link.symlink_to(model_folder)
    assert served_names(kvpolicy, monkeypatch, "--model", link) == ["current"]
    monkeypatch.chdir(tmp_path)
    above = f"../{tmp_path.name}/current/"
    assert served_names(kvpolicy, monkeypatch, "--model", above) == ["current"]
    monkeypatch.chdir(model_folder)
    assert served_names(kvpolicy, monkeypatch, "--model", ".") == [model_folder.name]


def test_a_served_model_has_the_names_that_it_is_given(
    kvpolicy: Shell, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model_folder, "--served-model-name", "mine", "--served-model-name", "gpt-4")
    assert served_names(kvpolicy, monkeypatch, *words) == ["mine", "gpt-4"]


@pytest.mark.slow
def test_plans_are_listed_once_and_answer_under_every_name() -> None:
    with serving(plans_of(full=0, h2o=12), aliases=("org/other:1",)) as running:
        client = running.client()
        listed: list[Any] = list(client.models.list())
        ids = [one.id for one in listed]
        assert ids == ["tiny", "org/other:1", "tiny:full", "tiny:h2o"]
        assert [one.parent for one in listed] == [None, None, "tiny", "tiny"]
        assert {one.root for one in listed} == {"tiny"}
        for name in (*ids, "org/other:1:full", "org/other:1:h2o"):
            found = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert found.model == name
            assert client.models.retrieve(name).id == name


@pytest.mark.parametrize(
    "words",
    [
        ("--served-model-name", ""),
        ("--served-model-name", "a\nb"),
        ("--served-model-name", "a" * 257),
        ("--served-model-name", "a", "--served-model-name", "a"),
        ("--allow-origin", "chat.example.com"),
        ("--allow-origin", "https://chat.example.com/"),
        ("--ssl-keyfile", "key.pem"),
        ("--ssl-certfile", "none.pem"),
        ("--ssl-certfile", "none.pem", "--on", "ray"),
    ],
)
def test_what_cannot_be_reached_is_refused(
    kvpolicy: Shell, model_folder: Path, words: tuple[str, ...]
) -> None:
    given = ("serve", "--port", 0, "--model", model_folder, "--policy", "full", *words)
    assert words[0] in refusal(kvpolicy(*given))


# Pages of other origins

ORIGIN = "https://chat.example.com"


def preflight(running: Running, origin: str) -> httpx2.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with running.http(headers=headers) as http:
        return http.request("OPTIONS", PATH)


def test_without_an_origin_no_page_reads_an_answer(server: Running) -> None:
    with server.http(headers={"Origin": ORIGIN}) as http:
        answer = http.post(PATH, json=BODY)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert preflight(server, ORIGIN).status_code == 405


def test_a_page_of_an_allowed_origin_asks_and_reads() -> None:
    with serving(origins=(ORIGIN,), api_keys=("key",)) as running:
        asked = preflight(running, ORIGIN)  # browsers send no key with it
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert "POST" in asked.headers["access-control-allow-methods"]
        with running.http(headers={"Origin": ORIGIN}) as http:
            refused = http.post(PATH, json=BODY)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == ORIGIN  # it reads why
            given = {"Authorization": "Bearer key"}
            answer = http.post(PATH, json={**BODY, "stream": True}, headers=given)
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert answer.text.strip().endswith("data: [DONE]")
        other = "https://evil.example"
        assert "access-control-allow-origin" not in preflight(running, other).headers
        with running.http(headers={"Origin": other, "Authorization": "Bearer key"}) as http:
            answer = http.post(PATH, json=BODY)
            assert "access-control-allow-origin" not in answer.headers


def test_any_origin_may_be_allowed() -> None:
    with serving(origins=("*",)) as running:
        assert preflight(running, ORIGIN).headers["access-control-allow-origin"] == "*"


# TLS: a certificate for localhost of its own, for a hundred years

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUUlYk/a550/r2gJrqpffWiVrMQJwwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNzAxMDIwOFoYDzIxMjYxMTAz
MDEwMjA4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASA1EuCN1OJHH1kZ5A7wmEVRIK9F9zKH2Gi6IYm/382m7/v0DfqFEc9
N+/tl12oQ+KzpDJHmSfEaU4Y4DnQyh+No28wbTAdBgNVHQ4EFgQUuYPvE3ujyZxy
7tiNxtomf5ODglYwHwYDVR0jBBgwFoAUuYPvE3ujyZxy7tiNxtomf5ODglYwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIgCMW+QxIhHUgZvpMpXYPOD1tVHqFCzSZ6QxX94WtxhjICIQDP
5LZyogNyDjpHI59WbzEbBtqLP5bA2DeKgiqq40aJAg==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgAj5v/ErqVEQYZ540
dexKNItxSUIsde5Wuzah1CWeZM+hRANCAASA1EuCN1OJHH1kZ5A7wmEVRIK9F9zK
H2Gi6IYm/382m7/v0DfqFEc9N+/tl12oQ+KzpDJHmSfEaU4Y4DnQyh+N
-----END PRIVATE KEY-----
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    certfile.write_text(CERTIFICATE, encoding="utf-8")
    keyfile.write_text(KEY, encoding="utf-8")
    return certfile, keyfile


def test_a_server_with_a_certificate_speaks_tls(files: tuple[Path, Path]) -> None:
    with serving(certificate=Certificate(*files)) as running:
        assert running.url.startswith("https://")
        trusting: Any = httpx2.Client(verify=ssl.create_default_context(cafile=files[0]))
        client = openai.OpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=trusting
        )
        with client:
            events = client.completions.create(
                model="tiny", prompt="a", max_tokens=5, stream=True, temperature=0
            )
            assert "".join(event.choices[0].text for event in events)
        plain = running.url.replace("https", "http")
        with httpx2.Client(trust_env=False) as http, pytest.raises(httpx2.HTTPError):
            http.get(f"{plain}/health")
        assert running.idle()


def test_a_certificate_needs_its_key(files: tuple[Path, Path], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(CERTIFICATE + KEY, encoding="utf-8")
    assert Certificate(both).keyfile is None
    missing = tmp_path / "none.pem"
    for wrong in ((files[0], None), (files[1], files[0]), (tmp_path, None), (missing, None)):
        with pytest.raises(KVPolicyError, match="--ssl-certfile"):
            Certificate(*wrong)

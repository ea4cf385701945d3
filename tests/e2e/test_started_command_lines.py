"""`quire serve` with options of vLLM's command line: real processes, the bundled model."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from quire.config.engine import ConfigError, ServerConfig
from quire.server.listening import listening_socket
from support.server_process import Server
from support.waiting import LONGEST


@pytest.mark.slow
def test_an_api_key_comes_from_the_environment_and_the_longest_request_from_memory(monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    with Server("--num-gpu-blocks-override", "9", "--max_model_len", "auto", "--load-format", "dummy") as server:
        assert server.get("/health")[0] == 200
        assert server.get("/v1/models")[0] == 401
        right = urllib.request.Request(server.url + "/v1/models", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(right, timeout=LONGEST) as response:
            assert json.load(response)["data"][0]["max_model_len"] == 8 * 16


def certificates(directory: Path) -> None:
    """An authority (ca.pem), and what it signed: server.pem and client.pem, each with its .key."""
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    key = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=quire-test"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)


@pytest.mark.slow
def test_clients_must_show_a_certificate_that_the_authorities_signed(tmp_path: Path):
    certificates(tmp_path)
    files = ["--ssl-certfile", f"{tmp_path}/server.pem", "--ssl-keyfile", f"{tmp_path}/server.key"]
    options = {"ssl_certfile": f"{tmp_path}/server.pem", "ssl_keyfile": f"{tmp_path}/server.key"}
    for wrong in ({"ssl_ca_certs": "/nowhere"}, {"ssl_ciphers": "NONE-SUCH"}):
        with pytest.raises(ConfigError, match="ssl_ca_certs or ssl_ciphers cannot be used"):
            listening_socket(ServerConfig.create(**options, **wrong))
    checked = ["--ssl-ca-certs", f"{tmp_path}/ca.pem", "--ssl-cert-reqs", "2", "--uvicorn-log-level", "info"]
    with Server(*files, *checked, "--load-format", "dummy", "--kv-cache-memory-bytes", "64M") as server:
        context = ssl.create_default_context(cafile=f"{tmp_path}/ca.pem")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(server.url + "/health", context=context, timeout=LONGEST)
        context.load_cert_chain(f"{tmp_path}/client.pem", f"{tmp_path}/client.key")
        with urllib.request.urlopen(server.url + "/health", context=context, timeout=LONGEST) as response:
            assert response.status == 200

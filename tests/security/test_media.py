"""Pictures, videos and sounds that would take a decoder long: their requests fail alone, and nobody else notices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from PIL import Image

from quire.multimodal import decoding
from quire.multimodal.decoding import Encoded, ItemCache, decoded, refusal
from quire.multimodal.families.base import Prepared
from quire.multimodal.pictures import MediaError
from quire.platform.untrusted.limits import MIB, BusyError, Limits
from support.attack_variants import damaged
from support.attacks import steady_memory, witness
from support.media_bombs import data_url, gif, jpeg_of_scans, png, saved, wav
from support.server import Answer, Host, Service, eventually


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(model="quire-demo/vision", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
    yield host
    host.close()


@pytest.fixture(scope="module")
def server(host: Host) -> Iterator[Service]:
    server = host.serve()
    files = [saved(Image.new("RGB", (40, 40))), jpeg_of_scans(1500, 2)]
    with steady_memory(lambda: [ask(server, data_url(file)) for file in files]):
        yield server


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little time for a job, so that the tests need less."""
    for kind in decoding.LIMITS:
        monkeypatch.setitem(decoding.LIMITS, kind, Limits(0.3, 512 * MIB, 600.0, result_bytes=400 * MIB))


def ask(server: Service, url: str, **fields: object) -> Answer:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0, **fields}
    return server.post("/v1/chat/completions", body)


def worked(kind: decoding.Kind, *files: bytes) -> object:
    """What a worker process decodes. Raises MediaError."""
    encoded = Encoded(kind, files, 16_000)
    try:
        return decoded(kind, encoded.submit().result())
    except ValueError as error:
        raise refusal(error) from error


# ---- what is decoded is what it was


def test_a_worker_decodes_what_this_process_would():
    picture = Image.effect_mandelbrot((40, 30), (-2, -1, 1, 1), 50).convert("RGB")
    for kind in ("PNG", "JPEG", "WEBP"):
        data = saved(picture, kind)
        assert worked("image", data).tobytes() == Encoded("image", (data,)).decode().tobytes()
    video = worked("video", gif(40, 8))
    assert (len(video.images), video.images[0].size) == (32, (8, 8))
    assert len(worked("frames", saved(picture), saved(picture)).images) == 2
    pytest.importorskip("soundfile")
    assert worked("audio", wav(0.5)).shape == (8000,)


# ---- bombs


@pytest.mark.parametrize(
    ("kind", "make"),
    [("image", lambda: jpeg_of_scans(1500, 2000)), ("video", lambda: gif(60_000)), ("image", lambda: png(7900, 7900))],
    ids=["scans", "frames", "pixels"],
)
def test_what_takes_long_is_given_up(short, kind, make):
    with pytest.raises(MediaError, match="cannot be decoded: it needs more than"):
        worked(kind, make())


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("image", png(60_000, 60_000, b"")),
        ("image", png(1, 64_000_001, b"")),
        ("image", b""),
        ("image", b"\x89PNG"),
        ("video", gif(0)),
        ("image", b"BM" + bytes(100)),
    ],
    ids=["3.6 gigapixels", "64 megapixels", "nothing", "a beginning", "no frame", "zeros"],
)
def test_what_is_too_large_or_no_picture_is_refused(kind, data):
    with pytest.raises(MediaError):
        worked(kind, data)


@pytest.mark.parametrize("seconds", [4000.0])
def test_a_sound_of_absurd_duration_is_refused(seconds):
    pytest.importorskip("soundfile")
    with pytest.raises(MediaError):
        worked("audio", wav(0.1, rate=1, declared=1 << 31))
    with pytest.raises(MediaError, match="takes"):
        worked("audio", wav(seconds, rate=1000))


def test_the_client_gets_a_400_and_others_are_served_meanwhile(short, server: Service):
    bomb = data_url(jpeg_of_scans(1500, 2000), "image/jpeg")
    with witness(server), ThreadPoolExecutor(4) as pool:
        bombs = [pool.submit(ask, server, bomb) for _ in range(4)]
        large = {"prompt": "x" * 30_000, "max_tokens": 1}
        assert server.post("/v1/completions", large).status == 400  # large bodies have their turns
        for answer in (bomb.result() for bomb in bombs):
            assert (answer.status, answer.error["param"]) == (400, "messages[0].content[0].image_url")
            assert "processor time" in answer.error["message"]
    assert ask(server, data_url(saved(Image.new("RGB", (20, 20))))).status == 200


def test_a_pool_that_has_too_much_to_do_is_a_503(monkeypatch, server: Service):
    def refuse(self: Encoded) -> None:
        raise BusyError("128 jobs of this kind are waiting or running, which is the limit")

    monkeypatch.setattr(Encoded, "submit", refuse)
    answer = ask(server, data_url(saved(Image.new("RGB", (21, 20)))))
    assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
    assert answer.headers["retry-after"] == "1"


# ---- clients that leave


def test_a_client_that_leaves_ends_its_job_and_gives_its_turn_back(monkeypatch, server: Service):
    """Its body is large, so that it has a turn while it is parsed."""
    jobs = []
    submit = Encoded.submit

    def submitted(self: Encoded) -> object:
        jobs.append(submit(self))
        return jobs[-1]

    for kind in decoding.LIMITS:
        monkeypatch.setitem(decoding.LIMITS, kind, Limits(500.0, 512 * MIB, 600.0))
    monkeypatch.setattr(Encoded, "submit", submitted)
    data = jpeg_of_scans(2000, 200_000)
    assert len(data) > 20_000
    content = [{"type": "image_url", "image_url": {"url": data_url(data)}}]
    with witness(server):
        for _ in range(3):
            with server.connection("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}):
                count = len(jobs)
                eventually(lambda count=count: len(jobs) > count)
                layer = server.app.middleware_stack
                while not hasattr(layer, "turns"):
                    layer = layer.app
                assert not layer.turns.locked()
            eventually(lambda: jobs[-1].cancelled())
    assert ask(server, data_url(saved(Image.new("RGB", (22, 20))))).status == 200


# ---- the cache


def test_what_was_decoded_is_not_decoded_again(monkeypatch, server: Service):
    count = 0
    submit = Encoded.submit

    def counting(self: Encoded) -> object:
        nonlocal count
        count += 1
        return submit(self)

    monkeypatch.setattr(Encoded, "submit", counting)
    url = data_url(saved(Image.new("RGB", (33, 20), (1, 2, 3))))
    assert ask(server, url).json["choices"] == ask(server, url).json["choices"]
    assert count == 1
    ask(server, data_url(saved(Image.new("RGB", (33, 20), (1, 2, 4)))))
    assert count == 2


def test_the_cache_is_bounded_and_keeps_what_was_used_last():
    import numpy as np

    cache = ItemCache(5000)
    for name in "abc":
        cache.put(name, Prepared({"x": np.zeros(500, np.uint8)}, "", 1))
    assert cache.get("a") is not None
    cache.put("d", Prepared({"x": np.zeros(500, np.uint8)}, "", 1))
    assert [name for name in "abcd" if cache.get(name)] == ["a", "c", "d"]
    cache.put("e", Prepared({"x": np.zeros(6000, np.uint8)}, "", 1))
    assert cache.get("e") is None


def test_settings_and_files_are_told_apart():
    keys = {
        Encoded(kind, files, rate).key(kwargs)
        for kind in ("image", "audio")
        for files in ((b"ab",), (b"a", b"b"), (b"", b"ab"))
        for rate in (0, 1)
        for kwargs in (None, {"a": 1}, {"a": 2})
    }
    assert len(keys) == 36


# ---- generated


def check_that_it_ends(file: tuple[decoding.Kind, bytes]) -> None:
    kind, data = file
    began = time.monotonic()
    with contextlib.suppress(MediaError):
        worked(kind, data)
    assert time.monotonic() - began < 60


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(file=damaged())
def test_a_damaged_file_is_decoded_or_refused(file):
    check_that_it_ends(file)


@pytest.mark.nightly
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(file=damaged())
def test_many_damaged_files_are_decoded_or_refused(file):
    check_that_it_ends(file)

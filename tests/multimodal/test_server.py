"""Pictures over HTTP, sent by openai's client, and refusals of pictures that cannot be used."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from openai import BadRequestError, OpenAI

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.seeing import picture, prepared


@pytest.fixture(scope="module")
def service(host):
    return host.serve()


@pytest.fixture(scope="module")
def client(service):
    return OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


def encoded(image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(url: str, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def ask(client, *parts, **options) -> str:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    options = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}, **options}
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": content}], **options)
    return answer.choices[0].message.content


def refused(client, *parts) -> dict:
    with pytest.raises(BadRequestError) as raised:
        ask(client, *parts)
    return raised.value.body


def test_openais_client_gets_what_the_offline_engine_says(client, host, folder):
    url = data_url(encoded(picture(1)))
    path, _ = prepared("llava", folder)
    llm = LLM(
        str(path), dtype="float32", max_model_len=400, max_num_seqs=8, chat_template=host.llm.config.model.chat_template
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for part in (image_part(url), {"type": "image_pil", "image_pil": picture(1)}):
        content = [{"type": "text", "text": "What is this? "}, part]
        [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        assert ask(client, "What is this? ", image_part(url)) == output.outputs[0].text
    assert ask(client, "What is this? ", image_part(data_url(encoded(picture(2))))) != output.outputs[0].text


def test_a_model_that_does_not_hear_makes_no_transcripts(client):
    with pytest.raises(BadRequestError, match="makes no transcripts"):
        client.audio.transcriptions.create(model="demo", file=("a.wav", b"RIFF"))


def test_a_stream_and_several_answers_with_pictures(client):
    part = image_part(data_url(encoded(picture(3), "JPEG")))
    whole = ask(client, "Say: ", part)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Say: "}, part]}],
        temperature=0,
        max_tokens=12,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole


def test_the_other_apis_see_the_same_picture(client, service):
    url = data_url(encoded(picture(4)))
    data = url.partition(",")[2]
    expected = ask(client, image_part(url), "What is it?")
    wanted = {"temperature": 0, "ignore_eos": True}
    text = {"type": "input_text", "text": "What is it?"}
    response = client.responses.create(
        model="demo",
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}, text]}],
        max_output_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert response.output_text == expected
    more = client.responses.create(
        model="demo", input="Again.", previous_response_id=response.id, max_output_tokens=12, temperature=0
    )
    assert more.usage.input_tokens > response.usage.input_tokens + 12

    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    answer = service.post("/v1/messages", {**body, "max_tokens": 12, **wanted})
    assert answer.json["content"][0]["text"] == expected
    assert service.post("/v1/messages/count_tokens", body).json == {"input_tokens": response.usage.input_tokens}

    body = {"stream": False, "options": {"num_predict": 12, "temperature": 0, "ignore_eos": True}}
    message = {"role": "user", "content": "What is it?", "images": [data]}
    answer = service.post("/api/chat", {"messages": [message], **body})
    assert answer.json["message"]["content"] == expected
    answer = service.post("/api/generate", {"prompt": "What is it?", "images": [data], **body})
    assert answer.json["response"] == expected


def test_the_other_apis_name_a_picture_that_cannot_be_used(service):
    user, wrong = {"role": "user"}, {"type": "input_image", "image_url": "x"}
    for path, body, param in (
        ("/api/chat", {"messages": [{**user, "content": "a", "images": ["@@"]}]}, "messages[0].images"),
        ("/api/generate", {"prompt": "a", "images": ["@@"]}, "images"),
        ("/api/generate", {"prompt": "a", "images": [""], "raw": True}, "images"),
        ("/v1/responses", {"input": [{**user, "content": [wrong]}]}, "input"),
        ("/v1/responses", {"input": [{"role": "system", "content": [wrong]}]}, "input"),
        ("/v1/responses", {"input": [{**user, "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            "/v1/messages",
            {
                "messages": [{**user, "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}],
                "max_tokens": 5,
            },
            "messages[0].content[0]",
        ),
    ):
        answer = service.post(path, body)
        assert answer.status == 400, answer.body
        assert param in str(answer.json["error"]), answer.json


def test_pictures_count_as_tokens_and_equal_ones_are_cached(client):
    part = image_part(data_url(encoded(picture(9))))
    content = [
        {"type": "text", "text": "Twenty-odd tokens of text. "},
        part,
        {"type": "text", "text": "And then some more."},
    ]
    usages = []
    for _ in range(2):
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": content}], max_tokens=2, temperature=0
        )
        usages.append(answer.usage)
    assert usages[0].prompt_tokens > 16
    cached = usages[1].prompt_tokens_details
    assert cached is None or cached.cached_tokens >= 16


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no image"),
        (b"not an image at all", "no image"),
        (encoded(picture(1))[:-200], "damaged"),
        (encoded(picture(1), "JPEG")[:-400], "damaged"),
        (b"%PDF-1.4", "no image"),
    ],
)
def test_malformed_pictures_are_refused_with_the_name_of_the_part(client, data, reason):
    error = refused(client, "Look: ", image_part(data_url(data)))
    assert error["param"] == "messages[0].content[1].image_url"
    assert reason in error["message"]


def bomb(width: int, height: int) -> bytes:
    """A small PNG that declares a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 10_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (2_000_000_000, 1), (9_000, 9_000)])
def test_decompression_bombs_are_refused_before_they_are_decoded(client, monkeypatch, width, height):
    decoded: list[object] = []
    monkeypatch.setattr("quire.multimodal.pictures._loaded", decoded.append)
    error = refused(client, image_part(data_url(bomb(width, height))))
    assert "pixels" in error["message"] or "no image" in error["message"]
    assert not decoded


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://example.org/x.png", "must begin with"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:image/png", "no data"),
        ("file:///etc/passwd", "allowed_local_media_path"),
        ("http://127.0.0.1:1/x.png", "private address"),
        ("http://localhost:1/x.png", "private address"),
        ("http://169.254.169.254/latest/meta-data", "private address"),
        ("http://[::ffff:127.0.0.1]/x.png", "private address"),
        ("http://0x7f.1/x.png", "private address"),
        ("http://2130706433/", "private address"),
        ("http://[::1", "not valid"),
        ("http:///x", "name a host"),
    ],
)
def test_urls_that_are_not_allowed_are_refused(client, url, reason):
    error = refused(client, image_part(url))
    assert error["param"] == "messages[0].content[0].image_url"
    assert reason in error["message"]
    assert "passwd" not in error["message"]


def test_only_files_below_the_allowed_folder_are_read(client, host, tmp_path):
    inside, outside = host.shared / "inside.png", tmp_path / "outside.png"
    for file in (inside, outside):
        file.write_bytes(encoded(picture(1)))
    (host.shared / "link.png").symlink_to(outside)
    assert ask(client, image_part(f"file://{inside}"))
    for path in (outside, host.shared / "link.png", host.shared / ".." / outside.name, host.shared):
        assert "allowed_local_media_path" in refused(client, image_part(f"file://{path}"))["message"]


def test_too_many_pictures_and_other_media_are_refused(client):
    part = image_part(data_url(encoded(picture(1))))
    assert "limit_mm_per_prompt" in refused(client, *[part] * 4)["message"]
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    error = refused(client, audio)
    assert error["param"] == "messages[0].content[0].input_audio"
    assert "takes no audio" in error["message"]
    assert "video" in refused(client, {"type": "video_url", "video_url": {"url": "data:,x"}})["message"]


def test_a_text_that_contains_the_placeholder_is_refused_beside_a_picture(client):
    error = refused(client, "<image>", image_part(data_url(encoded(picture(1)))))
    assert "placeholders" in error["message"]
    assert ask(client, "the text <image> alone is a text")


def test_equal_names_share_and_wrong_names_are_refused(client):
    url = data_url(encoded(picture(5)))
    assert ask(client, image_part(url, uuid="one")) == ask(client, image_part(url, uuid="one"))
    assert "uuid" in refused(client, image_part(url, uuid="x" * 1000))["message"]


class _Slow(BaseHTTPRequestHandler):
    """Serves pictures, redirects, endless files, and bytes that drip."""

    def do_GET(self) -> None:
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", "http://10.0.0.1/secret" if self.path == "/away" else self.path)
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        try:
            if self.path == "/endless":
                while True:
                    self.wfile.write(b"x" * 65536)
            elif self.path == "/drip":
                while True:
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.1)
            else:
                self.wfile.write(encoded(picture(6)))
        except OSError:
            pass

    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def remote():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_files_are_fetched_within_limits(remote):
    from quire.multimodal.fetch import fetch
    from quire.multimodal.pictures import MediaError, decode

    here = ["127.0.0.1"]
    assert decode(fetch(f"{remote}/picture", here)).size == picture(6).size
    for path, reason, options in (
        ("/none", "404", {}),
        ("/away", "allowed_media_domains", {}),
        ("/away/again", "redirected", {}),
        ("/endless", "bytes", {"most_bytes": 1 << 20}),
        ("/drip", "took too long|cannot be fetched|no image", {"seconds": 1.0}),
    ):
        with pytest.raises(MediaError, match=reason):
            decode(fetch(f"{remote}{path}", here, **options))
    with pytest.raises(MediaError, match="private"):
        fetch(f"{remote}/picture")
    with pytest.raises(MediaError, match="domain"):
        fetch(f"{remote}/picture", ["example.org"])


# ---- prompt_embeds


def saved(tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def complete(service, **body):
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **body}
    return service.request("POST", "/v1/completions", json.dumps(body).encode(), Content_Type="application/json")


def test_embeddings_of_a_text_say_what_the_text_says(service, folder):
    path, _ = prepared("llava", folder)
    from safetensors.torch import load_file, save

    table = next(t for name, t in load_file(path / "model.safetensors").items() if name.endswith("embed_tokens.weight"))
    ids = [1, *range(40, 80)]
    expected = complete(service, prompt=ids).json["choices"][0]["text"]
    embeds = table[ids].clone()
    for text in (saved(embeds), base64.b64encode(save({"x": embeds})).decode(), saved(embeds[None])):
        answer = complete(service, prompt_embeds=text)
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["text"] == expected
    both = complete(service, prompt=ids, prompt_embeds=[saved(embeds)]).json["choices"]
    assert [choice["text"] for choice in both] == [expected, expected]


class _Evil:
    def __reduce__(self):
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: saved(torch.eye(64).to_sparse()), "sparse"),
        (lambda: saved(torch.eye(64).to_sparse_csr()), "sparse|dense"),
        (lambda: saved({"a": torch.zeros(2, 64)}), "dense"),
        (lambda: saved(torch.zeros(2, 64, dtype=torch.int64)), "float32"),
        (lambda: saved(torch.zeros(64, 2).T), "contiguous"),
        (lambda: saved(torch.zeros(2, 63)), "63"),
        (lambda: saved(torch.zeros(64)), "hidden"),
        (lambda: saved(torch.full((2, 64), float("nan"))), "finite"),
        (lambda: saved(torch.zeros(2, 64))[:-40] + "AAAA", "neither|incomplete"),
        (lambda: "@@", "base64"),
        (lambda: base64.b64encode(b"PK\3\4garbage").decode(), "neither"),
        (lambda: base64.b64encode(b"\xff" * 100).decode(), "neither"),
    ],
)
def test_embeddings_that_cannot_be_used_are_refused(service, made, reason, capfd):
    answer = complete(service, prompt_embeds=made())
    assert answer.status == 400
    assert answer.error["param"] == "prompt_embeds"
    assert __import__("re").search(reason, answer.error["message"]), answer.error


def test_nothing_is_unpickled(service, capfd):
    torch_file = io.BytesIO()
    torch.save(_Evil(), torch_file)
    answer = complete(service, prompt_embeds=base64.b64encode(torch_file.getvalue()).decode())
    assert answer.status == 400
    assert "unpickled" not in capfd.readouterr().out

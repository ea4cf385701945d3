"""Transcripts over HTTP, asked for by openai's client, and refusals of files and fields that cannot be used."""

from __future__ import annotations

import io
import re
import struct
import time

import numpy as np
import pytest
import soundfile
import torch
from openai import APIStatusError, OpenAI

from quire.messages.sampling_params import SamplingParams
from quire.multimodal.sounds import MOST_BYTES
from support.engines import make_llm
from support.hearing import (
    DE,
    EN,
    GENERATION,
    NO_SPEECH,
    NO_TIMES,
    PREVIOUS,
    RATE,
    SECONDS,
    SOT,
    TRANSCRIBE,
    TRANSLATE,
    ZERO,
    extractor,
    network,
    sound,
    written,
)
from support.server import Host
from support.waiting import eventually

LONGEST = 40  # tokens of a piece: the tiny model never ends


@pytest.fixture(scope="module")
def host(folder):
    started = Host(model=str(written(folder)), dtype="float32", max_num_seqs=8)
    yield started
    started.close()


@pytest.fixture(scope="module")
def service(host):
    return host.serve()


@pytest.fixture(scope="module")
def client(service):
    return OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(written(folder), max_model_len=128)


def encoded(samples, rate: int = RATE, format: str = "WAV", **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()


WAV = encoded(sound(1), subtype="FLOAT")


def ask(client, data: bytes = WAV, api: str = "transcriptions", **fields):
    options = {"extra_body": {"max_completion_tokens": LONGEST}, **fields}
    return getattr(client.audio, api).create(model="demo", file=("a.wav", data), **options)


def post(service, fields: dict[str, str | bytes], api: str = "transcriptions"):
    """A form. Values that are bytes are files."""
    body = b""
    for name, value in fields.items():
        file = b'; filename="a.wav"' if isinstance(value, bytes) else b""
        head = b'--border\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), file)
        body += head + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=border"}
    return service.request("POST", f"/v1/audio/{api}", body + b"--border--\r\n", **kind)


def outputs(llm, pieces, prompt: list[int]):
    params = SamplingParams(temperature=0, max_tokens=LONGEST)
    prompts = [{"prompt_token_ids": prompt, "multi_modal_data": {"audio": [piece]}} for piece in pieces]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def spoken(text: str) -> str:
    """Without timestamps, which the tiny model says although it was told not to."""
    return re.sub(r"<\|[\d.]+\|>", "", text).strip()


def test_openais_client_gets_what_the_offline_engine_says(client, llm):
    for language, token in (("en", EN), ("de", DE)):
        [output] = outputs(llm, [sound(1)], [SOT, token, TRANSCRIBE, NO_TIMES])
        answer = ask(client, language=language)
        assert answer.text == spoken(output.text)
        assert answer.usage.seconds == 2
    [output] = outputs(llm, [sound(1)], [SOT, DE, TRANSLATE, NO_TIMES])
    assert ask(
        client, api="translations", extra_body={"language": "de", "max_completion_tokens": LONGEST}
    ).text == spoken(output.text)
    assert ask(client, language="de", response_format="text") == answer.text + "\n"


def test_a_large_file_needs_no_disk(client, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/missing")
    large = encoded(np.zeros(90_000), rate=RATE, subtype="DOUBLE") + bytes(1 << 20)  # some seconds, and what is ignored
    assert ask(client, large, language="en").usage.seconds == 6


def test_a_prompt_comes_before_the_transcript(client, llm):
    before = [PREVIOUS, *llm.frontend.tokenizer.encode(" Names: Quire.", False)]
    [output] = outputs(llm, [sound(1)], [*before, SOT, EN, TRANSCRIBE, NO_TIMES])
    assert ask(client, language="en", prompt="Names: Quire.").text == spoken(output.text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_language_and_chance_of_no_speech_are_those_of_transformers(client, folder, number):
    features = extractor()(sound(number), sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        logits = network(folder)(features, decoder_input_ids=torch.tensor([[SOT]])).logits[0, 0]
    answer = ask(client, encoded(sound(number), subtype="FLOAT"), response_format="verbose_json")
    assert answer.language == ("en" if logits[EN] > logits[DE] else "de")
    assert answer.segments[0].no_speech_prob == pytest.approx(logits.softmax(0)[NO_SPEECH].item(), rel=1e-3)


def test_segments_have_the_times_and_tokens_of_the_output(client, llm):
    [output] = outputs(llm, [sound(1)], [SOT, EN, TRANSCRIBE])
    answer = ask(client, language="en", response_format="verbose_json", timestamp_granularities=["segment"])
    assert answer.task == "transcribe"
    assert answer.language == "en"
    assert answer.duration == pytest.approx(1.5)
    times = [(token - ZERO) / 50 for token in output.token_ids if token >= ZERO]
    assert answer.segments[0].start == pytest.approx(times[0], abs=0.006)
    tokens = [token for segment in answer.segments for token in segment.tokens]
    assert tokens == [token for token in output.token_ids if token < ZERO]
    assert [segment.id for segment in answer.segments] == list(range(len(answer.segments)))
    assert all(segment.avg_logprob < 0 and segment.compression_ratio > 0 for segment in answer.segments)
    assert answer.text == "".join(segment.text for segment in answer.segments).strip()


def test_subtitles_have_the_segments(client):
    answer = ask(client, language="en", response_format="verbose_json")
    srt, vtt = (ask(client, language="en", response_format=kind) for kind in ("srt", "vtt"))
    assert srt.startswith("1\n00:00:0")
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    stamp = r"(\d\d):(\d\d):(\d\d)[.,](\d\d\d)"
    for text in (srt, vtt):
        found = re.findall(f"{stamp} --> {stamp}", text)
        assert len(found) == len(answer.segments)
        for numbers, segment in zip(found, answer.segments, strict=True):
            h, m, s, ms = map(int, numbers[:4])
            assert h * 3600 + m * 60 + s + ms / 1000 == pytest.approx(segment.start, abs=0.002)


def long_sound():
    """5.5 s: three pieces, cut where it is silent."""
    samples = sound(4, 5.5)
    samples[int(1.83 * RATE) : int(1.97 * RATE)] = 0
    samples[int(3.71 * RATE) : int(3.85 * RATE)] = 0
    return samples


def test_long_sounds_are_cut_where_they_are_quiet(client, llm):
    samples = long_sound()
    pieces = llm.processor.media.speech.pieces(samples)
    assert [piece.start for piece in pieces[1:]] == pytest.approx([1.9, 3.78], abs=0.1)
    assert np.array_equal(np.concatenate([piece.samples for piece in pieces]), samples)
    assert all(len(piece.samples) <= SECONDS * RATE for piece in pieces)
    found = outputs(llm, [piece.samples for piece in pieces], [SOT, EN, TRANSCRIBE, NO_TIMES])
    wanted = spoken("".join(output.text for output in found))
    data = encoded(samples, subtype="FLOAT")
    assert ask(client, data, language="en").text == wanted
    segments = ask(client, data, language="en", response_format="verbose_json").segments
    starts = [segment.start for segment in segments]
    assert starts == sorted(starts)
    assert starts[-1] > 3.7


def test_streams_have_openais_events_and_vllms_chunks(client, service):
    data = encoded(long_sound(), subtype="FLOAT")
    wanted = ask(client, data, language="en").text
    *deltas, done = list(ask(client, data, language="en", stream=True))
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert done.text == wanted
    assert "".join(event.delta for event in deltas).strip() == wanted
    fields = {"language": "en", "stream": "true", "max_completion_tokens": str(LONGEST), "file": data}
    events = post(service, fields, "translations").events
    assert {event["object"] for event in events} == {"translation.chunk"}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events).strip() == events[-1]["text"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("format", "rate"), [("FLAC", 16_000), ("OGG", 16_000), ("MP3", 24_000), ("WAV", 44_100)])
def test_files_of_many_formats_are_heard(client, format, rate):
    two = np.stack([sound(1, rate=rate)] * 2, 1)
    answer = ask(client, encoded(two, rate, format), language="en", response_format="verbose_json")
    assert answer.duration == pytest.approx(1.5, abs=0.06)
    assert answer.segments


def refused(client, data: bytes = WAV, status: int = 400, **fields) -> dict:
    began = time.process_time()  # of this process, in which the server is a thread
    with pytest.raises(APIStatusError) as raised:
        ask(client, data, **fields)
    assert raised.value.status_code == status
    assert time.process_time() - began < 60
    return raised.value.body


def lying_wav(rate: int = RATE, channels: int = 1, data: int = 0xFFFF_FF00) -> bytes:
    """A small WAV file that declares other sizes."""
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2 % 2**32, channels * 2, 16)
    head = b"RIFF" + struct.pack("<I", 0xFFFF_FFFF) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", data) + b"\0" * 1000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not a sound at all", "no sound in a known format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no sound in a known format"),
        (b"RIFF\xff\xff\xff\xffWAVE", "no sound in a known format"),
        (encoded(sound(1), format="FLAC")[:60], ""),
        (lying_wav(rate=1), "samples a second"),
        (lying_wav(rate=2**31 - 1), "samples a second"),
        (lying_wav(channels=200), "channels"),
        (encoded(np.zeros(0, np.float32)), "no samples"),
        (encoded(np.array([np.inf, 1.0]), subtype="FLOAT"), "not finite"),
        (encoded(np.zeros(3700 * 8000, np.int16), 8000, "FLAC"), "at most 3600"),
        (b"RIFF" + bytes(MOST_BYTES), "at most"),
    ],
    ids=lambda value: f"{len(value)}",
)
def test_files_that_cannot_be_heard_are_refused(client, data, reason):
    error = refused(client, data)
    assert error["param"] == "file"
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "tlh"}, "language"),
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"response_format": "srt", "stream": True}, "response_format"),
        ({"prompt": "<|startoftranscript|>"}, "prompt"),
        ({"include": ["logprobs"]}, "include"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"max_completion_tokens": 1000}}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_fields_that_cannot_be_used_are_refused(client, fields, param):
    assert refused(client, **fields)["param"] == param


def test_bodies_that_are_no_forms_are_refused(service, client):
    path = "/v1/audio/transcriptions"
    assert service.post(path, {"file": "x"}).status == 415
    assert post(service, {"other": b"x"}).error["param"] == "other"
    assert post(service, {"file": "a text"}).error["param"] == "file"
    assert post(service, {"language": "en"}).error["param"] == "file"
    for body, kind in ((b"--x\r\nbad", "multipart/form-data; boundary=x"), (b"", "multipart/form-data")):
        answer = service.request("POST", path, body, **{"Content-Type": kind})
        assert answer.status == 400
        assert answer.error
    with pytest.raises(APIStatusError) as raised:
        client.audio.transcriptions.create(model="another", file=("a.wav", WAV))
    assert raised.value.status_code == 404
    with pytest.raises(APIStatusError, match="needs a sound"):
        client.completions.create(model="demo", prompt="A text")
    assert GENERATION["is_multilingual"]


def test_nothing_is_left_behind(host, client):
    ask(client, language="en")
    eventually(lambda: host.is_idle, "free blocks")

"""POST /v1/audio/transcriptions and /v1/audio/translations"""

import asyncio
import math
import re
import zlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, Self

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from quire.engine.processor import Prompt, PromptFields
from quire.messages.errors import error_text
from quire.messages.outputs import CompletionOutput
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.platform.extras import install_command
from quire.server.bodies import HeldBody
from quire.server.errors import ApiError, json_response
from quire.server.fields import Positive
from quire.server.generation import Call, Server
from quire.server.protocol import Generation
from quire.server.responses import Transcript
from quire.server.routing import stream_answers, validated
from quire.server.streams import EventStream

router = APIRouter()
MultiPartParser.spool_max_size = 1 << 62  # no temporary file: body limits count memory, and the disk may be full
_TIME = re.compile(r"<\|\d+\.\d\d\|>")
MOST_FIELDS = 100  # of a form
MOST_ROOM = 2  # the text before a transcript may take 1 / MOST_ROOM of the model's context


class TranscriptionRequest(Generation):
    """The fields of the form, except for the file."""

    language: str | None = Field(None, max_length=16, description="Spoken in the file, as in ISO 639-1; or detected.")
    prompt: str | None = Field(None, description="What was said before, or words that may occur.")
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"  # type: ignore[assignment]
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(None, description="With verbose_json.")
    max_completion_tokens: Positive | None = Field(None, description="Of each piece of up to 30 s.")
    include: list[str] | None = None
    chunking_strategy: str | None = Field(None, description="Without effect: long files are always cut.")

    @property
    def with_times(self) -> bool:
        return self.response_format in ("verbose_json", "srt", "vtt")

    @property
    def max_tokens_field(self) -> str:
        return "max_completion_tokens"

    @property
    def constraint_field(self) -> str | None:
        return None

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        return None

    def drop_prompt(self) -> None:
        self.prompt = None

    def given(self) -> dict[str, Any]:
        values = {"temperature": 0.0, **super().given(), "max_tokens": self.max_completion_tokens}
        if self.response_format == "verbose_json":
            values["logprobs"] = 0
        return values

    def unsupported(self) -> tuple[str, str] | None:
        if self.stream and self.with_times:
            return "response_format", "should be json or text for a stream"
        if self.timestamp_granularities and self.response_format != "verbose_json":
            return "timestamp_granularities", "needs the response_format verbose_json"
        if "word" in (self.timestamp_granularities or ()):
            return "timestamp_granularities", "cannot be word: the times of segments are known, not those of words"
        for name in ("include", "structured_outputs", "prompt_logprobs"):
            if getattr(self, name):
                return name, "is not supported for transcripts"
        if (self.n or 1) > 1:
            return "n", "should be 1"
        return None


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional form field without null, which forms do not have."""
    return {**{k: v for k, v in schema.items() if k != "anyOf"}, **schema.get("anyOf", [{}])[0]}


def _form(model: type[TranscriptionRequest]) -> dict[str, Any]:
    """Return the form's description for /openapi.json."""
    names = (
        *(model.model_fields.keys() - Generation.model_fields.keys()),
        "model",
        "response_format",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {name: _not_null(schema["properties"][name]) for name in sorted(names)}
    file = {
        "type": "string",
        "format": "binary",
        "description": "WAV, FLAC, MP3, Ogg, M4A, MP4 or WebM, of at most 25 MiB.",
    }
    form = {"type": "object", "required": ["file"], "properties": {"file": file, **properties}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


_ROUTE: dict[str, Any] = {
    "responses": stream_answers(Transcript),
    "response_model": None,
    "openapi_extra": _form(TranscriptionRequest),
}


@router.post("/v1/audio/transcriptions", **_ROUTE)
async def create_transcription(request: Request) -> Response:
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", **_ROUTE)
async def create_translation(request: Request) -> Response:
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    body, data = await _read(request)
    transcription = await _Transcription.begin(request, body, data, task)
    if body.stream:
        return await EventStream.begin(transcription.stream(), transcription.call.keep_alive_interval)
    return await transcription.collect()


async def _read(request: Request) -> tuple[TranscriptionRequest, bytes]:
    """Read the fields of the form, and its file. Raises ApiError."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "Content-Type should be multipart/form-data", param="Content-Type")
    try:
        from python_multipart.multipart import parse_options_header
    except ImportError as error:
        raise ApiError(501, f"the server lacks packages for sound: {install_command('audio')}") from error
    _, options = parse_options_header(request.headers["content-type"])
    # Some of Python's codecs take quadratic time, or raise unusual errors.
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise ApiError(415, "Content-Type: charset should be utf-8", param="Content-Type")
    try:
        async with request.form(max_files=1, max_fields=MOST_FIELDS) as form:
            values = _values(form)
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file: a file is needed", param="file")
            return validated(TranscriptionRequest, values), await file.read()
    except ClientDisconnect as error:
        raise ApiError(499, "the client closed the connection") from error


def _values(form: FormData) -> dict[str, Any]:
    """Return the fields except for the file. Fields whose names end in [] are lists."""
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise ApiError(400, f"{name[:64]}: it should not be a file", param=name[:64])
        elif name.endswith("[]") or name in ("timestamp_granularities", "include"):
            values.setdefault(name.removesuffix("[]"), []).append(value)
        elif value:  # an empty field is treated as omitted
            values[name] = value
    return values


class _Transcription:
    """The transcription of a file: one engine request for each piece that fits into the model's input."""

    def __init__(self, call: Call, body: TranscriptionRequest, task: str, speech: Any, samples: Any) -> None:
        self.call = call
        self.body = body
        self.task = task
        self.speech = speech
        self.seconds, self.pieces = len(samples) / speech.sample_rate, speech.pieces(samples)
        self.spans = [(piece.start, len(piece.samples) / speech.sample_rate) for piece in self.pieces]
        self.meter = call.meter()
        self.places = dict[str, int]()
        self.language: str | None = body.language
        self.no_speech = [0.0] * len(self.pieces)

    @classmethod
    async def begin(cls, request: Request, body: TranscriptionRequest, data: bytes, task: str) -> Self:
        """Decode the file, find the language, and tokenize. Raises ApiError."""
        server: Server = request.app.state.server
        call = Call(server, request, body, "trsc")
        media = server.llm.processor.media
        if media is None or media.speech is None:
            raise ApiError(400, "this model makes no transcripts", param="model")
        speech = media.speech
        language = body.language and body.language.lower()
        if language is not None and speech.languages and language not in speech.languages:
            known = ", ".join(speech.languages)
            raise ApiError(400, f"language: the model does not know it; it knows {known}", param="language")
        try:
            beginning = speech.beginning(body.prompt, server.llm.max_model_len // MOST_ROOM - 8)
        except ValueError as error:
            raise ApiError(400, error_text(error), param="prompt") from error
        held: HeldBody = request.state.body
        async with server.media.sounds:
            try:
                samples = await held.unless_left(server.media.sound(data))
            except ValueError as error:
                raise ApiError(400, f"file: {error_text(error)}", param="file") from error
            made = cls(call, body, task, speech, samples)
            made.language = language
            await made._listen(beginning)
            made.language = made.language if speech.languages else "en"
            code = speech.languages.get(made.language or "")
            prompt = speech.prompt(beginning, task, code, body.with_times)
            prompts: list[Prompt] = [made._prompt(prompt, place) for place in range(len(made.pieces))]
            requests = await call.process(prompts, None, False, "file")
            made.places = {processed.request_id: place for place, processed in enumerate(requests)}
            made.pieces.clear()  # the response may take long
        return made

    def _prompt(self, token_ids: list[int], place: int) -> PromptFields:
        sound = self.pieces[place].samples
        return PromptFields(prompt_token_ids=list(token_ids), multi_modal_data={"audio": [sound]})

    async def _listen(self, beginning: list[int]) -> None:
        """Read the language from the model's first token and, with verbose_json, the probability of no speech. The
        pieces' embeddings stay in the encoder's cache for the transcript."""
        detects = self.language is None and bool(self.speech.languages)
        places = range(len(self.pieces) if self.body.response_format == "verbose_json" else int(detects))
        first = await asyncio.gather(*(self._first_token(beginning, place) for place in places))
        self.no_speech = [chance for _, chance in first]
        if detects:
            codes = {token_id: code for code, token_id in self.speech.languages.items()}
            self.language = codes[first[0][0]]

    async def _first_token(self, beginning: list[int], place: int) -> tuple[int, float]:
        """Return the likeliest language of a piece, and the probability that it has no speech."""
        llm = self.call.server.llm
        no_speech = self.speech.no_speech
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            allowed_token_ids=[*self.speech.languages.values()] or None,
            logprob_token_ids=[no_speech],
        )
        name = f"{self.call.id}-first-{place}"
        async for output in llm.generate(self._prompt(beginning, place), params, name):
            completion = output.outputs[0]
        if completion.finish_reason == "overloaded":
            raise ApiError(503, str(completion.stop_reason), code="server_overloaded", headers={"Retry-After": "1"})
        if completion.finish_reason == "error":
            raise ApiError(500, f"the request failed: {completion.stop_reason}", code="request_failed")
        chances: Mapping[int, Any] = completion.logprobs[0] if completion.logprobs else {}
        found = chances.get(no_speech)
        return completion.token_ids[0], 0.0 if found is None else math.exp(found.logprob)

    async def collect(self) -> Response:
        """Return the complete response."""
        outputs: list[Any] = [None] * len(self.spans)
        async with aclosing(self.call.run()) as running:
            async for output in running:
                self.meter.add(output)
                outputs[self.places[output.request_id]] = output.outputs[0]
        kind = self.body.response_format
        if not self.body.with_times:
            text = "".join(_without_times(output.text) for output in outputs).strip()
            return PlainTextResponse(text + "\n") if kind == "text" else json_response({"text": text, **self._usage})
        segments = [segment for place, output in enumerate(outputs) for segment in self._segments(place, output)]
        if kind != "verbose_json":
            return PlainTextResponse(_subtitles(segments, kind == "vtt"))
        for number, segment in enumerate(segments):
            segment["id"] = number
        return json_response(
            {
                "task": self.task,
                "language": self.language,
                "duration": self.seconds,
                "text": "".join(segment["text"] for segment in segments).strip(),
                "segments": segments,
                **self._usage,
            }
        )

    @property
    def _usage(self) -> dict[str, Any]:
        return {"usage": {"type": "duration", "seconds": math.ceil(self.seconds)}}

    def _segments(self, place: int, output: CompletionOutput) -> Iterable[dict[str, Any]]:
        (start, seconds), logprobs = self.spans[place], output.logprobs or []
        for found in self.speech.segments(output.token_ids, seconds):
            tokens = output.token_ids[found.first : found.last]
            text = self.speech.text(tokens)
            chances = [logprobs[i][output.token_ids[i]].logprob for i in range(found.first, found.last) if logprobs]
            encoded = text.encode()
            yield {
                "id": 0,
                "seek": round(start * 100),
                "start": round(start + found.start, 2),
                "end": round(start + found.end, 2),
                "text": text,
                "tokens": tokens,
                "temperature": self.body.temperature or 0.0,
                "avg_logprob": sum(chances) / max(len(chances), 1),
                "compression_ratio": len(encoded) / len(zlib.compress(encoded)),
                "no_speech_prob": self.no_speech[place] if self.no_speech else 0.0,
            }

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield events of the text, piece by piece. They have the fields of both OpenAI's events and vLLM's chunks."""
        waiting = [list[str]() for _ in self.spans]
        done = [False] * len(self.spans)
        place = 0
        texts = list[str]()
        async with aclosing(self.call.run()) as running:
            async for output in running:
                self.meter.add(output)
                completion = output.outputs[0]
                index = self.places[output.request_id]
                waiting[index].append(_without_times(completion.text))
                done[index] |= completion.finish_reason is not None
                while place < len(waiting):
                    text = "".join(waiting[place])
                    waiting[place].clear()
                    text = text if texts else text.lstrip()
                    if text:
                        texts.append(text)
                        yield self._event("transcript.text.delta", text, None, delta=text)
                    if not done[place]:
                        break
                    place += 1
        usage = self.meter.usage
        tokens = {
            "type": "tokens",
            **usage,
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        }
        yield self._event("transcript.text.done", "", "stop", text="".join(texts).strip(), usage=tokens)

    def _event(self, kind: str, content: str, reason: str | None, **fields: Any) -> bytes:
        head = self.call.head("translation.chunk" if self.task == "translate" else "transcription.chunk")
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": reason, "stop_reason": None}
        return b"data: " + msgspec.json.encode({"type": kind, **head, "choices": [choice], **fields}) + b"\n\n"


def _without_times(text: str) -> str:
    """Remove timestamps, which models sometimes generate without being asked. Each is one token, so none is
    incomplete."""
    return _TIME.sub("", text) if "<|" in text else text


def _subtitles(segments: Iterable[Mapping[str, Any]], is_vtt: bool) -> str:
    """Return the segments as WebVTT or SubRip."""
    mark = "." if is_vtt else ","
    blocks = ["WEBVTT\n"] if is_vtt else []
    for number, segment in enumerate(segments, 1):
        times = " --> ".join(_clock(segment[name], mark) for name in ("start", "end"))
        text = segment["text"].strip().replace("-->", "->")
        blocks.append(("" if is_vtt else f"{number}\n") + f"{times}\n{text}\n")
    return "\n".join(blocks)


def _clock(seconds: float, mark: str) -> str:
    """Format a time like 00:01:02.500."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"

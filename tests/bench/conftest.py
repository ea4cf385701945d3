"""A small server of the OpenAI API on loopback, whose timings and faults the test decides."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from support.waiting import LONGEST

FIRST, GAP = 0.15, 0.03  # seconds to the first token, and between tokens


class FakeServer:
    """Answers `max_tokens` tokens "a b c ...". Records every body it got.

    usage: "each chunk", "end" or "never"; strict: refuses fields that it does not know; text_only: refuses token ids;
    fault(body number, body): None, "500", "cut", "error event", "silent", "two a chunk", or
    "ragged": events come in pieces of 7 bytes.
    """

    def __init__(self, usage="each chunk", strict=False, text_only=False, fault=lambda number, body: None, **entry):
        self.usage, self.strict, self.text_only, self.fault = usage, strict, text_only, fault
        self.entry = {"id": "tiny", "object": "model", **entry}
        self.bodies, self.headers, self.url = [], [], ""
        self.running = self.most_running = 0

    def measured(self, count):
        """The last bodies: those after the probes."""
        return self.bodies[-count:]

    async def models(self, request):
        return web.json_response({"object": "list", "data": [self.entry]})

    async def complete(self, request):
        body = await request.json()
        chat = request.path.endswith("/chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        options = body.get("stream_options", {})
        if self.strict and (set(options) - {"include_usage"} or (self.usage == "never" and options)):
            return web.json_response({"error": {"message": "unknown field in stream_options"}}, status=400)
        if self.text_only and not isinstance(prompt, str):
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=422)
        self.bodies.append(body)
        self.headers.append(request.headers)
        fault = self.fault(len(self.bodies), body)
        if fault == "500":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.stream(request, body, prompt, chat, fault)
        finally:
            self.running -= 1

    async def stream(self, request, body, prompt, chat, fault):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        prompt_tokens = 2 * len(prompt.split()) + 7 if isinstance(prompt, str) else len(prompt)

        async def send(text, finish, count):
            delta = {"delta": {"content": text}} if chat else {"text": text}
            event = {"choices": [{"index": 0, "finish_reason": finish, **delta}]}
            if self.usage == "each chunk":
                event["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
            data = f"data: {json.dumps(event)}\n\n".encode()
            size = 7 if fault == "ragged" else len(data)
            for begin in range(0, len(data), size):
                await response.write(data[begin : begin + size])
                await asyncio.sleep(0)

        if chat:
            await send("", None, 0)  # the role
        await response.write(b": a comment\n\n")
        total = body["max_tokens"]
        step = 2 if fault == "two a chunk" else 1
        for done in range(step, total + 1, step):
            await asyncio.sleep(FIRST if done == step else GAP)
            if fault == "cut" and done > total // 2:
                return response
            if fault == "error event" and done > total // 2:
                await response.write(b'data: {"error": {"message": "the engine died"}}\n\n')
                return response
            text = "" if fault == "silent" else " " + chr(97 + done % 26)
            await send(text, "length" if done + step > total else None, done)
        if self.usage == "end":
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": total}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def serve():
    """serve(**behaviour) starts a server in a thread; it ends with the `with` block."""

    @contextmanager
    def start(**behaviour):
        server, ready = FakeServer(**behaviour), threading.Event()
        loop = asyncio.new_event_loop()

        async def setup():
            app = web.Application()
            app.router.add_get("/v1/models", server.models)
            app.router.add_post("/v1/completions", server.complete)
            app.router.add_post("/v1/chat/completions", server.complete)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return runner

        def run():
            asyncio.set_event_loop(loop)
            runner = loop.run_until_complete(setup())
            loop.call_soon(ready.set)
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(LONGEST)
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(LONGEST)

    return start

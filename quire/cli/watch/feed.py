"""Follows a server in a thread: the event stream of its page, or its metrics if the page is disabled."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from quire.cli.watch.picture import EventReader, MetricsReader, Picture
from quire.messages.errors import error_text
from quire.observability.logging import printable

RETRY_SECONDS = 1.0
METRICS_SECONDS = 1.0
TIMEOUT_SECONDS = 10.0  # the stream has four events a second
_NEEDS_KEY = "the server needs an API key: --api-key KEY, or QUIRE_API_KEY in the environment"


class Feed:
    """picture: the latest state. title: a description of the server. problem: why there is no new data, or empty.
    refusal: why there will never be any. Hold `lock` while reading them.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.lock = threading.Lock()
        self.picture: Picture | None = None
        self.title = ""
        self.problem = "connecting"
        self.refusal = ""
        self.lost_at = time.monotonic()
        self._url = url
        self._key = api_key
        threading.Thread(target=self._follow, name="follow the server", daemon=True).start()

    def _follow(self) -> None:
        while not self.refusal:
            try:
                try:
                    self._follow_events()
                except urllib.error.HTTPError as error:
                    if error.code != 404:
                        raise
                    self._follow_metrics()
                self._lost("the server has closed the connection")
            except urllib.error.HTTPError as error:
                self._refused(error)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                reason = getattr(error, "reason", error)
                self._lost(error_text(reason) if isinstance(reason, Exception) else str(reason))
            time.sleep(RETRY_SECONDS)

    def _refused(self, error: urllib.error.HTTPError) -> None:
        if error.code in (401, 403):
            self.refusal = _NEEDS_KEY
        elif error.code == 404:
            self.refusal = f"{self._url} has neither the events of a page nor metrics: is it a server of Quire?"
        else:
            self._lost(f"status {error.code}")

    def _lost(self, problem: str) -> None:
        with self.lock:
            if not self.problem:
                self.lost_at = time.monotonic()
            self.problem = printable(problem, 200)

    def _open(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return urllib.request.urlopen(
            urllib.request.Request(self._url + path, headers=headers), timeout=TIMEOUT_SECONDS
        )

    def _follow_events(self) -> None:
        reader = EventReader()
        with self._open("/ui/events") as stream:
            with self._open("/ui/about") as answer:
                about = json.load(answer)
            with self.lock:
                if self.picture is not None and self.picture.has_details:  # the curves continue
                    reader.picture.output = self.picture.output
                    reader.picture.prompt = self.picture.prompt
                self.title = printable(f"Quire {about['version']}, {', '.join(about['models'])}", 200)
            for line in stream:
                if line.startswith(b"data: "):
                    with self.lock:
                        reader.take(json.loads(line[6:]))
                        self.picture = reader.picture
                        self.problem = ""

    def _follow_metrics(self) -> None:
        reader = MetricsReader()
        while True:
            with self._open("/metrics") as answer:
                text = answer.read().decode()
            with self.lock:
                reader.take(text, time.monotonic())
                self.picture = reader.picture
                self.problem = ""
                self.title = printable(reader.picture.others.pop("Model", ""), 200)
            time.sleep(METRICS_SECONDS)

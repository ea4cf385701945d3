"""Finds the request that makes cores fail by running the suspects one at a time."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.scheduler.request import Request


class TrialGate:
    """A Gate. A suspect (a request with `trial`) passes when all requests that passed before it have had an output.
    Later requests wait until the suspect has output `trial` tokens or has ended.

    So if the core is lost while a suspect is on trial, that suspect is the only request without progress. The journal
    contains its id and survives the core.
    """

    def __init__(self, requests: Mapping[str, Request], wake: Callable[[], None], journal: Path | None = None) -> None:
        """requests: the unfinished ones, by id. wake: makes the scheduler check the gates again. journal: None for a
        core in the process of its user, which it does not survive."""
        self.journal = journal
        self._requests = requests
        self._wake = wake
        self._held: dict[str, bool] = {}  # requests in order of arrival -> whether they are suspects
        self._on_trial: str | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._held) or self._on_trial is not None

    def ready(self, request: EngineCoreRequest) -> bool:
        return request.request_id not in self._held

    def connect(self, wake: Callable[[], None]) -> None:
        """Do nothing: `proceed` is called on the core's thread, and wakes the scheduler itself."""

    def arrive(self, request: EngineCoreRequest) -> None:
        """Called before a request is added."""
        if request.trial or self.is_active:
            self._held[request.request_id] = bool(request.trial)

    def proceed(self) -> None:
        """Let the next requests pass."""
        if self._on_trial is not None and not self._is_new(self._on_trial):
            self._put_on_trial(None)
        while self._held and self._on_trial is None:
            request_id, is_suspect = next(iter(self._held.items()))
            if is_suspect and request_id in self._requests:
                if any(self._is_new(other) for other in self._requests):
                    return
                self._put_on_trial(request_id)
            del self._held[request_id]
            self._wake()

    def _is_new(self, request_id: str) -> bool:
        """Whether a request has passed but has not yet shown that it can run."""
        request = self._requests.get(request_id)
        if request is None or request_id in self._held:
            return False
        source = request.source
        num_output = len(request.token_ids) - len(source.prompt_token_ids) - len(source.output_token_ids)
        return num_output < max(1, source.trial)

    def _put_on_trial(self, request_id: str | None) -> None:
        self._on_trial = request_id
        if self.journal is not None:
            write_journal(self.journal, request_id)


def write_journal(journal: Path, request_id: str | None) -> None:
    """Write the journal: a symbolic link to the id, since a link can be created even on a full disk."""
    try:
        journal.unlink(missing_ok=True)
        if request_id is not None:
            journal.symlink_to(request_id)
    except OSError as error:
        logger.error("A request on trial cannot be written to %s: %s", journal, error_text(error))


def read_journal(journal: Path) -> str | None:
    """Return the id of the request on trial."""
    with contextlib.suppress(OSError):
        return str(journal.readlink())
    return None

"""The two files of a batch: requests, and responses that are appended as requests finish."""

import fcntl
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ID = "batch_req_"  # prefix of a response id; the number of the request's line follows
_NO_ID = hash(None)


class BatchLine(msgspec.Struct):
    """A line of the input. Fields may have any type, since an invalid line gets a response, too."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    """The fields of a response that a later run reads."""

    id: str
    custom_id: str | None
    error: dict[str, Any] | None


def parse(line: bytes | None) -> BatchLine | None:
    """Return None for a line that is not a JSON object or is too long."""
    try:
        return None if line is None else _parse(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


_parse = msgspec.json.Decoder(BatchLine).decode
_parse_answer = msgspec.json.Decoder(_Answer).decode


def custom_id(request: BatchLine | None) -> str | None:
    return request.custom_id if request is not None and isinstance(request.custom_id, str) else None


class BatchFiles:
    """Tracks which requests of the input have no response in the output. Needs 9 bytes of memory per line.

    A response's id contains the number of its request's line, so a run after a kill skips the finished lines. An
    incomplete last line of the output is removed.
    """

    def __init__(self, input_file: Path, output_file: Path, max_line_bytes: int) -> None:
        """Raises OSError for files that cannot be read or written, and ValueError if a custom_id occurs twice, or if
        the output contains anything but responses to this input."""
        self.input_file = input_file
        self.output_file = output_file
        self._max_line_bytes = max_line_bytes
        self._custom_ids = array("q")  # hashes, by line number - 1
        self._unanswered = bytearray()  # 1 for a request without a response, by line number - 1
        if not input_file.is_file():
            raise ValueError(f"{input_file} is not a file" if input_file.exists() else f"there is no file {input_file}")
        self._read_input()
        self.num_requests = self.num_unanswered
        self.num_failed = 0
        self._output = os.open(output_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        if stat.S_ISREG(os.fstat(self._output).st_mode):
            self._lock()
            self._read_output()

    @property
    def num_unanswered(self) -> int:
        return self._unanswered.count(1)

    def unanswered(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (number, text) of each line whose request has no response yet. The text of a line that is too long is
        None.

        Lines that were added to the file since it was read are left for the next run.
        """
        return ((number, line) for number, line in self._lines() if self._unanswered[number - 1 : number] == b"\1")

    def write(self, number: int, answer: dict[str, Any]) -> None:
        """Append the response to a line's request. Raises OSError."""
        line = msgspec.json.encode({"id": f"{_ID}{number}", **answer}) + b"\n"
        try:
            while line:
                line = line[os.write(self._output, line) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.output_file)) from error
        self._unanswered[number - 1] = 0
        self.num_failed += answer["error"] is not None

    def close(self) -> None:
        os.close(self._output)

    def _lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (number, text) of the lines that are not empty."""
        limit = self._max_line_bytes + 2  # includes the line ending
        with open(self.input_file, "rb") as file:
            number = 0
            while line := file.readline(limit):
                number += 1
                if len(line) == limit and not line.endswith(b"\n"):
                    while (rest := file.readline(limit)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
                elif line := line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip():
                    yield number, line

    def _read_input(self) -> None:
        for number, line in self._lines():
            num_empty = number - 1 - len(self._unanswered)
            self._custom_ids.extend([_NO_ID] * num_empty)
            self._unanswered += bytes(num_empty)
            self._custom_ids.append(hash(custom_id(parse(line))))
            self._unanswered.append(1)
        hashes = np.frombuffer(self._custom_ids, np.int64)
        order = np.argsort(hashes, kind="stable")
        repeated = (hashes[order][1:] == hashes[order][:-1]) & (hashes[order][1:] != _NO_ID)
        if repeated.any():
            first, second = min(zip(order[:-1][repeated], order[1:][repeated], strict=True), key=lambda pair: pair[1])
            raise ValueError(f"{self.input_file}: line {second + 1} has the same custom_id as line {first + 1}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another quire run-batch is writing {self.output_file}") from error
        except OSError:
            pass  # the file system has no locks

    def _read_output(self) -> None:
        size = 0
        with open(self.output_file, "rb") as file:
            for place, line in enumerate(file, 1):
                begin = f'{{"id":"{_ID}'.encode()
                if not line.endswith(b"\n") and line.startswith(begin[: len(line)]):
                    os.truncate(self.output_file, size)
                    break
                size += len(line)
                try:
                    answer = _parse_answer(line)
                    number = int(answer.id.removeprefix(_ID))
                    if not (number > 0 and self._unanswered[number - 1]):
                        raise ValueError
                    if self._custom_ids[number - 1] != hash(answer.custom_id):
                        raise ValueError
                except (msgspec.MsgspecError, ValueError, IndexError) as error:
                    raise ValueError(
                        f"{self.output_file}: line {place} is not an answer to a request in {self.input_file}; name "
                        "another output file, or remove this one"
                    ) from error
                self._unanswered[number - 1] = 0
                self.num_failed += answer.error is not None

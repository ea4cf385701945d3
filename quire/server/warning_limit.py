"""Limits the log lines of warnings that clients without a key can cause with each request."""

import logging
import threading

SECONDS = 10.0  # between two lines


class WarningLimit(logging.Filter):
    """Logs a warning once. If it recurs, a line every `seconds` reports how often."""

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__()
        self._seconds = seconds
        self._counts: dict[str, int] = {}  # by message: occurrences since the last line
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        with self._lock:
            is_first = record.msg not in self._counts
            self._counts[record.msg] = 0 if is_first else self._counts[record.msg] + 1
        if is_first:
            self._report_later(record)
        return is_first

    def _report_later(self, record: logging.LogRecord) -> None:
        timer = threading.Timer(self._seconds, self._report, [record])
        timer.daemon = True
        timer.start()

    def _report(self, first: logging.LogRecord) -> None:
        with self._lock:
            count = self._counts.pop(first.msg)
            if count:
                self._counts[first.msg] = 0
        if not count:
            return
        self._report_later(first)
        message = f"{first.getMessage()} ({count:,} more in the last {self._seconds:g} s)"
        record = logging.LogRecord(first.name, logging.WARNING, first.pathname, first.lineno, message, (), None)
        logging.getLogger(first.name).callHandlers(record)  # without the filters

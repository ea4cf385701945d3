"""The records of requests for the metrics."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestRecord:
    """A request of n sequences, until the last of them has ended."""

    n: int
    unfinished: int
    longest: int = 0  # tokens of its longest output


@dataclass(slots=True)
class SequenceRecord:
    """An unfinished sequence. Times are by time.monotonic(), and 0 for events that have not happened."""

    request: RequestRecord
    num_prompt_tokens: int
    max_tokens: int
    arrived_at: float
    adapter: str = ""
    core: int = 0  # number of the core that runs it
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

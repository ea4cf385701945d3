"""The waiting requests, in the order of service. FCFS is priority scheduling with equal priorities."""

import heapq
from collections.abc import Iterator

from quire.scheduler.request import Request, Status


class RequestQueue:
    """A heap ordered by `Request.key`. A preempted request keeps its key, so it is served before later arrivals."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._removed = 0

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].status is not Status.WAITING:  # removed meanwhile
            heapq.heappop(self._heap)
            self._removed -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        return request

    def discard(self, request: Request) -> None:
        """Remove `request`, whose status is no longer WAITING. The heap drops it when it reaches the top."""
        self._removed += 1

    def __len__(self) -> int:
        return len(self._heap) - self._removed

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap if request.status is Status.WAITING)

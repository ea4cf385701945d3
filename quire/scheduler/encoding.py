"""Chooses which media a step encodes: a budget for each step, and a cache of embeddings shared by requests."""

from collections import OrderedDict

from quire.messages.media import EncoderLimits, MediaItem
from quire.messages.step import SchedulerOutput
from quire.scheduler.request import Request


class EncoderCache:
    """Tracks which items the workers' embedding cache holds, and which requests need them. Sizes are numbers of
    embeddings.

    An item is encoded in the step whose chunk first touches its tokens. Requests with the same item share it. A request
    holds an item until a step computes the last of its tokens; items without holders are evicted when the room is
    needed, least recently used first. A chunk ends before an item for which there is no budget or room. There is no
    deadlock: a request holds an item only while its chunks are inside the item, so its next chunk can continue to the
    item's end.
    """

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self._holders: dict[str, set[str]] = {}  # by key: the ids of the requests that hold it
        self._sizes: dict[str, int] = {}  # of all items in the cache, by key
        self._idle: OrderedDict[str, None] = OrderedDict()  # items without holders, the least recently used first
        self._released: list[str] = []  # in this step, whose chunks may still read them
        self._spent = 0
        self._forgets_all = False

    @property
    def used(self) -> int:
        return sum(self._sizes.values())

    def begin_step(self, step: SchedulerOutput) -> SchedulerOutput:
        self._spent = 0
        for key in self._released:
            if key in self._sizes and not self._holders[key]:
                self._idle[key] = None
                self._idle.move_to_end(key)
        self._released.clear()
        step.forgets_all = self._forgets_all
        self._forgets_all = False
        return step

    def limit(self, request: Request, start: int, count: int, step: SchedulerOutput | None) -> int:
        """Return how many of the request's next `count` tokens from `start` on the step can compute. Adds the items
        that they touch to the step. step: None to change nothing and only check whether there are any."""
        end = start + count
        for item in request.source.media:
            place = item.place
            if place.start >= end:
                break
            if place.end <= start:
                continue
            if (place.whole and place.end > end) or not self._hold(request, item, step):
                return max(place.start - start, 0)
        return count

    def is_full(self, request: Request, start: int) -> bool:
        """Whether there is too little budget or room for the item that contains the request's token at `start`."""
        return any(
            item.place.start <= start < item.place.end and not self._hold(request, item, None)
            for item in request.source.media
        )

    def computed(self, request: Request, end: int) -> None:
        """Called when the submitted steps compute the request's first `end` tokens."""
        for item in request.source.media:
            if item.place.end <= end:
                self._drop(request, item)

    def leave(self, request: Request) -> None:
        """Called when the request ends or will start over."""
        for item in request.source.media:
            self._drop(request, item)

    def withdraw(self, step: SchedulerOutput) -> SchedulerOutput:
        """Called when the step is not run. The items that it and earlier steps were to encode may be missing."""
        if self._sizes or step.forget or step.forgets_all:
            self.clear()
        return step

    def clear(self) -> None:
        """Treat all items as not encoded, for example because the weights have changed."""
        self._holders.clear()
        self._sizes.clear()
        self._idle.clear()
        self._released.clear()
        self._forgets_all = True

    def _hold(self, request: Request, item: MediaItem, step: SchedulerOutput | None) -> bool:
        key = item.place.key
        size = item.place.num_embeds
        if key not in self._sizes:
            idle = sum(self._sizes[other] for other in self._idle)
            if (
                self._spent and self._spent + size > self.limits.budget
            ) or self.used - idle + size > self.limits.capacity:
                return False
            if step is None:
                return True
            while self.used + size > self.limits.capacity:
                oldest, _ = self._idle.popitem(last=False)
                del self._sizes[oldest], self._holders[oldest]
                step.forget.append(oldest)
            self._sizes[key], self._holders[key] = size, set()
            self._spent += size
            step.encode.append(item)
        if step is not None:
            self._holders[key].add(request.request_id)
            self._idle.pop(key, None)
        return True

    def _drop(self, request: Request, item: MediaItem) -> None:
        holders = self._holders.get(item.place.key)
        if holders is not None and request.request_id in holders:
            holders.discard(request.request_id)
            if not holders:
                self._released.append(item.place.key)

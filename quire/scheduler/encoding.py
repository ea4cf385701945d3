"""Which pictures a step encodes: a budget for each step, and a cache of embeddings that requests share."""

from collections import OrderedDict

from quire.messages.media import EncoderLimits, MediaItem
from quire.messages.step import SchedulerOutput
from quire.scheduler.request import Request


class EncoderCache:
    """What the workers' cache of embeddings holds, and who needs it. Sizes are numbers of embeddings.

    An item is encoded in the step whose chunk first touches its tokens. Requests with the same item share it. A request
    holds an item until a step computes the last of its tokens; items that nobody holds stay until the room is needed,
    the least recently used first. A chunk ends before an item for which budget or room is lacking. There is no
    deadlock: a request holds an item only in its midst, so its next chunk can go on to the item's end.
    """

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self._holders: dict[str, set[str]] = {}  # by key: the ids of the requests that hold it
        self._sizes: dict[str, int] = {}  # of all items in the cache, by key
        self._idle: OrderedDict[str, None] = OrderedDict()  # items that nobody holds, the least recently used first
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
        """How many of the request's next `count` tokens from `start` on the step can compute. It encodes the items that
        they touch. step: None to change nothing, and to find out only whether there are any."""
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
        """Whether budget or room is lacking for an item that the request's token at `start` belongs to."""
        return any(
            item.place.start <= start < item.place.end and not self._hold(request, item, None)
            for item in request.source.media
        )

    def computed(self, request: Request, end: int) -> None:
        """The submitted steps compute the request's first `end` tokens."""
        for item in request.source.media:
            if item.place.end <= end:
                self._drop(request, item)

    def leave(self, request: Request) -> None:
        """The request ends, or will begin again."""
        for item in request.source.media:
            self._drop(request, item)

    def withdraw(self, step: SchedulerOutput) -> SchedulerOutput:
        """The step is not run. What it and earlier ones were to encode may not be there."""
        if self._sizes or step.forget or step.forgets_all:
            self.clear()
        return step

    def clear(self) -> None:
        """Take nothing for encoded any more, for example since the weights are others."""
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

"""The semantic router in the proxy: it rewrites requests, refuses them, or answers them from its cache."""

from quire.observability.logging import logger
from quire.router.call import Call
from quire.router.errors import RouteError
from quire.router.metrics import RouteMetrics
from quire.semantic.recorder import Recorder
from quire.semantic.router import Decision, SemanticRouter


class Decisions:
    def __init__(self, router: SemanticRouter, metrics: RouteMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self.names = [name for name in router.rules.models if name != "*"]

    def recorder(self, decision: Decision) -> Recorder | None:
        """Return what stores the response to a request in the cache, if it is to be stored."""
        cache = self._router.cache
        return None if cache is None or decision.remember is None else Recorder(decision, cache.largest)

    async def decide(self, call: Call, api_key: bytes) -> Decision | None:
        """Decide about a request, and give it the body and model of the decision. None: the rules do not apply to it.
        Raises RouteError if a rule refuses the request."""
        decision = await self._router.decide(call.target.partition("?")[0], call.body, api_key)
        if decision is None:
            return None
        chosen = decision.model if decision.is_chosen else None  # any client can make up other names
        self._metrics.decisions.labels(decision.rule, chosen or "").inc()
        self._metrics.decision_seconds.observe(decision.seconds)
        fields = {"request_id": call.request_id, "rule": decision.rule, "model": decision.model, **decision.because}
        logger.info("Request %s: %s", call.request_id, decision.header, extra={"fields": fields})
        if call.span is not None:
            call.span.set({f"quire.route.{name}": value for name, value in fields.items() if name != "request_id"})
        if decision.action.refuse is not None:
            headers = {"X-Quire-Route": decision.header}
            raise RouteError(400, decision.action.refuse, "content_filter", headers)
        if decision.hit is not None:
            self._metrics.cache_hits.inc()
        call.replace_body(decision.body)
        return decision

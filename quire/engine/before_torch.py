"""Imports what an engine needs besides torch and other large libraries. Import it while torch's library is being loaded
(see `quick_imports`).
"""

from contextlib import suppress
from importlib import import_module

_OURS = (
    "engine.tiers",
    "engine.trials",
    "executor.link",
    "lora.files",
    "messages.outputs",
    "models.heads.resolve",
    "models.registry",
    "observability.profiling.client",
    "parsing.recognition",
    "platform.untrusted.pool",
    "scheduler.scheduler",
)
_OF_TORCH = ("multiprocessing.reduction", "torchgen.model", "unittest.mock")  # which it imports in any case

for _name in _OURS:
    import_module(f"quire.{_name}")
for _name in _OF_TORCH:
    with suppress(ImportError):
        import_module(_name)

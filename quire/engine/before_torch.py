"""Imports what an engine needs besides torch and other large libraries. Import it while torch's library is being loaded
(see `quick_imports`).
"""

# ruff: noqa: F401  # imported for later
import multiprocessing.reduction
import unittest.mock  # torch imports these in any case
from contextlib import suppress

import quire.engine.tiers
import quire.engine.trials
import quire.executor.link
import quire.lora.files
import quire.messages.outputs
import quire.models.heads.resolve
import quire.models.registry
import quire.observability.profiling.client
import quire.parsing.recognition
import quire.platform.untrusted.pool
import quire.scheduler.scheduler

with suppress(ImportError):
    import torchgen.model  # type: ignore[import-untyped]

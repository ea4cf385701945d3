"""Commands that must succeed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

LONGEST_SECONDS = 3600


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Raises AssertionError with the output of a command that fails."""
    variables = {**os.environ, **environment}
    result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=LONGEST_SECONDS)
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
    return result

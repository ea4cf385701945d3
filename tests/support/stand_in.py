"""Runs code in a process of its own in which torch finds a GPU: a stand-in that compiles kernels but runs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

# After the installed packages, so that the installed quire is tested: support and benchmarks.
_FOLDERS = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
_FRAME = """
import sys
import warnings
sys.path += {folders!r}
warnings.simplefilter("ignore")
from benchmarks.gpu.tracing import stand_in
from quire.platform.gpu.cards import CARDS
with stand_in(CARDS[{card!r}]) as device:
{code}
"""


def run_on_stand_in(code: str, card: str = "sm_90", timeout: float = 600, **variables: str) -> str:
    """What the code prints. In it, `device` is the TracedStandIn. Triton's interpreter is off.

    variables: of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    program = _FRAME.format(folders=_FOLDERS, card=card, code=textwrap.indent(textwrap.dedent(code), "    "))
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout

"""What of clients' text may stand in the log, and how the log of a command looks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from quire.metrics.logging import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("tab\tline\n", "tab\\tline\\n"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u2028", "\\u2028"),
        ("éß", "éß"),
        ("x" * 12, "xxxxxxxxxx... (12 characters)"),
    ],
)
def test_clients_text_is_cut_and_its_control_characters_are_escaped(text: str, shown: str):
    assert printable(text, 10) == shown
    assert shown.isprintable()


def test_a_commands_log_has_one_line_a_message_on_standard_error():
    script = (
        "from quire.metrics.logging import configure_logging, logger\n"
        "configure_logging('INFO'); configure_logging('INFO'); logger.info('KV cache'); logger.debug('no')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    KV cache\n", done.stderr)

"""What of clients' text may stand in the log, and how the log of a command looks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from quire.observability.logging import printable


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
        "from quire.observability.logging import configure_logging, logger\n"
        "configure_logging('INFO'); configure_logging('INFO'); logger.info('KV cache'); logger.debug('no')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    KV cache\n", done.stderr)


def test_no_line_of_a_message_or_a_traceback_can_look_like_another_message():
    script = (
        "from quire.observability.logging import configure_logging, logger\n"
        "configure_logging('INFO')\n"
        "forged = 'x\\n12:00:00 ERROR   lost\\r\\x1b[2K\\x85y'\n"
        "try: int(forged + ';')\nexcept ValueError: logger.exception('A value: %s', forged)\n"
        "try: raise OSError(forged)\nexcept OSError: logger.exception('An error')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, *rest = done.stderr.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d ERROR   A value: x", first)
    assert rest[0] == r"    12:00:00 ERROR   lost\r\x1b[2K\x85y"
    assert r"    OSError: x" in rest
    assert all(line.isprintable() for line in rest)
    assert [line for line in rest if not line.startswith("    ")] == [next(s for s in rest if "An error" in s)]


@pytest.mark.parametrize("format", ["text", "json"])
def test_processes_are_told_how_to_log(format: str):
    script = (
        "from quire.observability.logging import configure_logging, log_options\n"
        f"configure_logging('warning', '{format}'); options = log_options()\n"
        "configure_logging(*options); print(*options[:2], options == log_options())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"WARNING {format} True\n"

"""A conversation's terminal: lines with editing and history, messages of several lines, wrapped answers."""

import contextlib
import os
import signal
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

from quire.system.folders import state_folder

_QUOTES = '"""'
_HISTORY_LINES = 1000


class Wrapper:
    """Breaks text that arrives in pieces at the borders of words, without holding any of it back.

    A word is shown as it comes. When it turns out too long for its line, it is erased there and shown again on the
    next line.
    """

    def __init__(self, columns: int) -> None:
        self.columns = max(columns - 1, 1)  # a terminal breaks the line by itself once its last column is used
        self._column = 0
        self._word = ""  # the part of the current word that is on the screen
        self._word_columns = 0

    def feed(self, text: str) -> str:
        """What to write to the terminal for the next piece of text."""
        return "".join(map(self._place, text))

    def _place(self, character: str) -> str:
        if character == "\n":
            self._column = self._word_columns = 0
            self._word = ""
            return character
        if character == "\t":
            return "".join(map(self._place, " " * (8 - self._column % 8)))
        if unicodedata.category(character) == "Cc":
            return ""  # no model may move the cursor or change the colours
        columns = _columns(character)
        written = ""
        if self._column + columns > self.columns:
            if character == " ":
                return self._place("\n")
            if columns == 2:  # a line may end in front of it, too
                self._word, self._word_columns = "", 0
            written = self._next_line()
        self._column += columns
        if character == " " or columns == 2:  # a line may end behind either
            self._word, self._word_columns = "", 0
        else:
            self._word += character
            self._word_columns += columns
        return written + character

    def _next_line(self) -> str:
        """Begin a line, with the word that would not end on the last one unless it began there."""
        if self._word_columns == self._column:
            self._word, self._word_columns = "", 0
        moved, erase = self._word, f"\x1b[{self._word_columns}D\x1b[K" if self._word else ""
        self._column = self._word_columns
        return f"{erase}\n{moved}"


def _columns(character: str) -> int:
    """How many columns of a terminal a character takes."""
    if character < "\u0300":
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Terminal:
    """Reads messages from standard input and writes answers to standard output, of which either may be no terminal."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._wraps = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._readline = _readline() if self.interactive else None
        self._reading = False
        self._line_was_empty = True
        self.stopped = False  # Ctrl-C was pressed since `answering` began

    def message(self) -> str | None:
        """The next message or command. None at the end of the input.

        Several lines are one message between triple quotes, after a backslash, and if they are pasted.
        """
        while True:
            try:
                self._reading = True
                return self._message()
            except EOFError:
                if self.interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\nCtrl-D or /bye leaves." if self._line_was_empty else "")
            finally:
                self._reading = False

    def _message(self) -> str:
        text = self._line(">>> ")
        before, quotes, rest = text.partition(_QUOTES)
        if quotes and (not before.strip() or before.startswith("/")):
            while _QUOTES not in rest:
                rest += "\n" + self._line("... ")
            inside, _, after = rest.partition(_QUOTES)
            return before + inside.strip("\n") + after
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._line("... ")
        return text

    def _line(self, prompt: str) -> str:
        return input(prompt if self.interactive else "")

    @contextlib.contextmanager
    def conversation(self) -> Iterator[None]:
        """Within it, Ctrl-C drops the line that is being typed, or sets `stopped`. The history of lines is kept."""
        if not self.interactive:
            yield
            return
        history = _History(self._readline)
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            history.save()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self._reading:
            self._line_was_empty = self._readline is None or not self._readline.get_line_buffer()
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def answer(self) -> Iterator["Answer"]:
        """Write an answer piece by piece."""
        self.stopped = False
        wrapper = Wrapper(os.get_terminal_size(sys.stdout.fileno()).columns or 80) if self._wraps else None
        yield Answer(wrapper)
        sys.stdout.write("\n\n" if self.interactive else "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Tell the user something that is no part of the conversation."""
        print(text, file=sys.stdout if self.interactive else sys.stderr, flush=True)


class Answer:
    """Writes what is new of a text that grows."""

    def __init__(self, wrapper: Wrapper | None) -> None:
        self.text = ""
        self._wrapper = wrapper

    def show(self, text: str) -> None:
        new = text[len(self.text) :]
        self.text = text
        sys.stdout.write(new if self._wrapper is None else self._wrapper.feed(new))
        sys.stdout.flush()


class _History:
    """The lines that were typed, of this session and those before. Where they cannot be kept, they are not."""

    def __init__(self, readline: ModuleType | None) -> None:
        folder = state_folder()
        self._file = None if folder is None else folder / "chat_history"
        self._readline, self._before = readline, 0
        if readline is not None and self._file is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._file)
            readline.set_history_length(_HISTORY_LINES)
            self._before = readline.get_current_history_length()

    def save(self) -> None:
        if self._readline is None or self._file is None:
            return
        new = self._readline.get_current_history_length() - self._before
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            _append(self._readline, new, self._file)


def _append(readline: ModuleType, lines: int, file: Path) -> None:
    """Append, since other sessions may have written meanwhile. Only this user may read what was said."""
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    if hasattr(readline, "append_history_file"):
        readline.append_history_file(max(lines, 0), file)
    else:  # a libedit without it
        readline.write_history_file(file)


def _readline() -> ModuleType | None:
    """Line editing for `input`, with pasted lines as one message where the library can. None if Python has none."""
    try:
        import readline
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline

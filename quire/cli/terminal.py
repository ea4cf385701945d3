"""The terminal of a conversation: line editing and history, multi-line messages, wrapped answers."""

import contextlib
import os
import signal
import sys
import unicodedata
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from quire.platform.folders import state_folder

if TYPE_CHECKING:
    from quire.cli.markdown import MarkdownWriter

_QUOTES = '"""'
_HISTORY_LINES = 1000


class Wrapper:
    """Wraps streamed text at word boundaries without delaying any of it.

    A word is shown as it arrives. When it turns out to be too long for its line, it is erased and written again on the
    next line.
    """

    def __init__(self, columns: int) -> None:
        self.columns = max(columns - 1, 1)  # a terminal breaks the line itself when its last column is used
        self._column = 0
        self._word = ""  # the part of the current word that is on the screen
        self._word_columns = 0

    def feed(self, text: str) -> str:
        """Return the characters to write to the terminal for the next piece of text."""
        return "".join(map(self._place, text))

    def _place(self, character: str) -> str:
        if character == "\n":
            self._column = self._word_columns = 0
            self._word = ""
            return character
        if character == "\t":
            return "".join(map(self._place, " " * (8 - self._column % 8)))
        if unicodedata.category(character) == "Cc":
            return ""  # a model must not move the cursor or change the colours
        columns = _columns(character)
        written = ""
        if self._column + columns > self.columns:
            if character == " ":
                return self._place("\n")
            if columns == 2:  # a line may also end before a wide character
                self._word = ""
                self._word_columns = 0
            written = self._next_line()
        self._column += columns
        if character == " " or columns == 2:  # a line may end after either
            self._word = ""
            self._word_columns = 0
        else:
            self._word += character
            self._word_columns += columns
        return written + character

    def _next_line(self) -> str:
        """Begin a new line and move the current word to it, unless the word fills the whole old line."""
        if self._word_columns == self._column:
            self._word = ""
            self._word_columns = 0
        erase = f"\x1b[{self._word_columns}D\x1b[K" if self._word else ""
        self._column = self._word_columns
        return f"{erase}\n{self._word}"


def _columns(character: str) -> int:
    """Return the number of terminal columns that a character occupies."""
    if character < "\u0300":
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Terminal:
    """Reads messages from standard input and writes answers to standard output. Either may be a file or a pipe.

    is_plain: show answers as they are, instead of drawing their Markdown. has_history: save typed lines in a file.
    is_multiline: messages end with an empty line. stopped: Ctrl-C was pressed since `answer` began.
    """

    def __init__(self, is_plain: bool = False, has_history: bool = True) -> None:
        self.interactive = sys.stdin.isatty()
        self.is_multiline = self.stopped = False
        self._wraps = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._draws = self._wraps and not is_plain and not os.environ.get("NO_COLOR")
        self._readline = _readline() if self.interactive else None
        self._has_history = has_history
        self._reading = False
        self._line_was_empty = True

    def message(self) -> str | None:
        """Return the next message or command, or None at the end of the input.

        Several lines form one message if they are between triple quotes, end with backslashes, or are pasted.
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
        if self.is_multiline and text and not text.startswith("/"):
            while line := self._line("... "):
                text += "\n" + line
        return text

    def _line(self, prompt: str) -> str:
        return input(prompt if self.interactive else "")

    @contextlib.contextmanager
    def conversation(self) -> Iterator[None]:
        """A context in which Ctrl-C discards the line being typed, or sets `stopped`. Saves the history on exit."""
        if not self.interactive:
            yield
            return
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with _history(self._readline if self._has_history else None):
                yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self._reading:
            self._line_was_empty = self._readline is None or not self._readline.get_line_buffer()
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def answer(self) -> Iterator["Answer"]:
        """A context in which an answer is written piece by piece."""
        self.stopped = False
        answer = Answer(self._wraps, self._draws)
        with _silence() if self.interactive else contextlib.nullcontext():
            try:
                yield answer
            finally:
                answer.finish()
                sys.stdout.write("\n\n" if self.interactive else "\n")
                sys.stdout.flush()

    def say(self, text: str) -> None:
        """Show a text that is not part of the conversation."""
        print(text, file=sys.stdout if self.interactive else sys.stderr, flush=True)


class Answer:
    """Writes an answer as it grows. text: all of it, without the thinking."""

    def __init__(self, wraps: bool, draws: bool) -> None:
        """wraps: whether to wrap lines at the width of the terminal. draws: whether to draw Markdown."""
        self.text = ""
        self._wrapper = Wrapper(_terminal_size().columns) if wraps else None
        self._markdown = _markdown_writer() if draws else None
        self._has_thought = False

    def show(self, text: str, is_thinking: bool = False) -> None:
        """Write the next part. Thinking is dim on a terminal; elsewhere it goes to standard error."""
        if not is_thinking and self._markdown is not None:
            if self._has_thought and not self.text:
                text = text.lstrip("\n")
                sys.stdout.write("\n\n" if text else "")
            self.text += text
            sys.stdout.write(self._markdown.feed(text))
            sys.stdout.flush()
            return
        self._has_thought |= is_thinking
        self.text += "" if is_thinking else text
        file = sys.stderr if is_thinking and self._wrapper is None else sys.stdout
        written = text if self._wrapper is None else self._wrapper.feed(text)
        file.write(f"\x1b[2m{written}\x1b[0m" if is_thinking and file is sys.stdout else written)
        file.flush()

    def finish(self) -> None:
        """Write the text that is not visible yet."""
        if self._markdown is not None:
            sys.stdout.write(self._markdown.finish())


def _markdown_writer() -> "MarkdownWriter":
    from quire.cli.markdown import MarkdownWriter  # imports much, which is not needed elsewhere

    return MarkdownWriter(_terminal_size)


def _terminal_size() -> os.terminal_size:
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return os.terminal_size((columns or 80, lines or 24))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A context in which keys are not echoed, since they would appear within the answer. The next line
    receives them.
    """
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = before.copy()
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextlib.contextmanager
def _history(readline: ModuleType | None) -> Iterator[None]:
    """A context whose lines are appended to a history file of earlier sessions. Errors of the file are ignored."""
    folder = state_folder()
    if readline is None or folder is None:
        yield
        return
    file = folder / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LINES)
    num_loaded = readline.get_current_history_length()
    try:
        yield
    finally:
        num_new = max(readline.get_current_history_length() - num_loaded, 0)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # only the user may read it
            if hasattr(readline, "append_history_file"):  # other sessions may have written meanwhile
                readline.append_history_file(num_new, file)
            else:  # some versions of libedit cannot append
                readline.write_history_file(file)


def _readline() -> ModuleType | None:
    """Line editing for `input`, or None if Python lacks it. Pasted lines are one message if the library supports it."""
    try:
        import readline
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline

"""`quire chat`: a conversation in the terminal."""

import argparse
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from quire.cli.flags import add_text_flags, engine_options, sampling_options
from quire.cli.model import add_model

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.messages.sampling_params import SamplingParams

HELP = "talk to a model in the terminal"
_COMMANDS = "/reset starts over, /exit or Ctrl-D leaves; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_text_flags(parser, max_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    from quire.engine.llm import LLM  # torch comes with it

    options = engine_options(arguments)
    llm = LLM(arguments.model, **options)
    params = llm.processor.default_sampling_params(**sampling_options(arguments))
    beginning = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(beginning)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing for input())

        print(f"Talking to {arguments.model or 'the bundled model'}. {_COMMANDS}.")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            print(end="\n" if interactive else "")
            break
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(beginning)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = _answer(llm, messages, params)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})
    llm.shutdown()
    return 0


def _answer(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str | None:
    """Stream the answer to the terminal. None if the conversation cannot be answered (it is too long, say)."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    previous = signal.signal(signal.SIGINT, stop)  # take effect between steps, so that the engine stays whole
    text = ""
    try:
        for output in llm.stream(llm.frontend.render_chat(messages), params, add_special_tokens=False):
            new = output.outputs[0].text
            sys.stdout.write(new[len(text) :])
            sys.stdout.flush()
            text = new
            if stopped:
                break
    except ValueError as error:
        print(f"{error}; /reset starts over", file=sys.stderr)
        return None
    finally:
        signal.signal(signal.SIGINT, previous)
    sys.stdout.write("\n")
    return text

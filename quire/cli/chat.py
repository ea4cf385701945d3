"""`quire chat`: a conversation in the terminal."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.conversation import Messages, load, save
from quire.cli.flags import engine_options
from quire.cli.model import add_model
from quire.cli.sampling import PARAMETERS, add_text_flags, sampling_options
from quire.cli.terminal import Answer, Terminal
from quire.messages.errors import error_text
from quire.parsing.events import Content, Event, Reasoning
from quire.parsing.reasoning import REASONING
from quire.platform.torch_import import quick_imports

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.messages.outputs import CompletionOutput

HELP = "talk to a model in the terminal"
_COMMANDS = """
  /help             show this list
  /show             show the model, how much of the context is used,
                    and the system message
  /set NAME VALUE   set a sampling parameter (VALUE "default": the
                    model's own); without NAME and VALUE, list them
  /system TEXT      set the system message; without TEXT, show it
  /clear            forget the conversation
  /save FILE        write the conversation and the parameters to a file
  /load FILE        go on with the conversation of a file
  /multiline on     end messages with an empty line; "off": with Enter
  /bye              leave, as /exit and Ctrl-D do

Ctrl-C stops an answer, or drops the line that you are typing.
For a message of several lines, paste it, put it between triple
quotes (\"\"\"), or end every line but the last with a backslash.
To send a message that begins with a slash, type a space first.
""".strip("\n")
_OLLAMA_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--plain", action="store_true", help="show answers as they are, not as Markdown")
    parser.add_argument(
        "--no-history", action="store_true", help="do not remember what is typed, nor offer older lines"
    )
    add_text_flags(parser, max_tokens=None)


def run(arguments: argparse.Namespace) -> int:
    terminal = Terminal(arguments.plain, not arguments.no_history)
    options = engine_options(arguments)
    with quick_imports():
        import quire.engine.before_torch  # noqa: F401  # while torch's library is being loaded
        from quire.config.engine import EngineConfig
        from quire.engine.frontend import Frontend
        from quire.models.heads.resolve import with_files

        config = EngineConfig.create(model=arguments.model, **options)
        frontend = Frontend(*with_files(config), in_process=True)
        if not frontend.has_chat_template:
            raise ValueError(
                "this model has no chat template, so it cannot hold a conversation; give it one with "
                "--chat-template FILE, or let it continue a text with: quire generate"
            )
        from quire.engine.llm import LLM  # imports torch
    llm = LLM.from_frontend(frontend)
    name = arguments.model or "the bundled model"
    chat = Chat(llm, name, terminal, sampling_options(arguments), arguments.system)
    if terminal.interactive:
        terminal.say(f"Talking to {name}. The context has {llm.max_model_len:,} tokens.")
        terminal.say("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.\n")
    with terminal.conversation():
        while (message := terminal.message()) is not None and chat.take(message):
            pass
    llm.shutdown()
    return 0


class Chat:
    """A conversation: its messages and the sampling parameters. Raises ValueError for invalid sampling options."""

    def __init__(self, llm: "LLM", model: str, terminal: Terminal, options: dict[str, Any], system: str | None) -> None:
        self._llm = llm
        self._model = model
        self._terminal = terminal
        self._options = options
        self._system = system
        self._params = llm.processor.default_sampling_params(chat=True, **options)
        self._messages: Messages = []
        self._num_tokens = 0  # of the conversation, up to the last answer

    def take(self, text: str) -> bool:
        """Answer a message or run a command. Returns False if the conversation is over."""
        message = text.strip()
        if text.startswith("/") and ("\n" not in message or message.startswith("/system")):
            return self._run_command(message)
        if message:
            self._answer(message)
        return True

    def _run_command(self, line: str) -> bool:
        """Returns False if the conversation is over."""
        command, _, argument = line.partition(" ")
        argument = argument.strip()
        match command:
            case "/bye" | "/exit" | "/quit":
                return False
            case "/help" | "/?":
                self._terminal.say(_COMMANDS)
            case "/clear" | "/reset":
                self._messages.clear()
                self._num_tokens = 0
                self._terminal.say("The conversation starts over.")
            case "/system":
                self._set_system(argument)
            case "/set":
                self._set(argument)
            case "/show":
                self._show()
            case "/save" | "/load":
                self._use_file(command, argument)
            case "/multiline":
                self._set_multiline(argument)
            case _:
                self._terminal.say(f"There is no command {command}; /help lists them.")
        return True

    def _answer(self, message: str) -> None:
        """Stream the answer to the terminal. A message that cannot be answered is removed from the conversation."""
        self._messages.append({"role": "user", "content": message})
        try:
            prompt = self._llm.frontend.render_chat(self._all_messages())
            with self._terminal.answer() as answer:
                completion = self._stream(prompt, answer)
        except ValueError as error:
            self._messages.pop()
            self._terminal.say(f"This cannot be answered: {error_text(error)}")
            return
        if answer.text:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()
        if completion is not None and completion.finish_reason == "length":
            self._explain_cut(completion)

    def _stream(self, prompt: str, answer: Answer) -> "CompletionOutput | None":
        """Print the answer as it grows, until it ends or the user stops it. Returns the answer so far. Raises
        ValueError if the answer ends in an error.
        """
        name = self._llm.frontend.reasoning
        params = self._params
        shown = 0
        format = None if name is None else REASONING[name]
        parser = None if format is None else format.make(format.is_open(prompt))
        if format is not None and format.needs_special_tokens:
            params = params.clone(skip_special_tokens=False)
        completion = None
        for output in self._llm.stream(prompt, params, add_special_tokens=False):
            completion = output.outputs[0]
            text = completion.text[shown:]
            shown = len(completion.text)
            events: list[Event] = [Content(text)]
            if parser is not None:
                events = parser.feed(text) + (parser.finish() if output.finished else [])
            for event in events:
                if isinstance(event, Reasoning | Content):
                    answer.show(event.text, isinstance(event, Reasoning))
            self._num_tokens = len(output.prompt_token_ids) + len(completion.token_ids)
            if completion.finish_reason == "error":
                raise ValueError(str(completion.stop_reason))
            if self._terminal.stopped:
                break
        return completion

    def _explain_cut(self, completion: "CompletionOutput") -> None:
        limit = self._params.max_tokens
        if limit is not None and len(completion.token_ids) >= limit:
            cause = "max_tokens is reached; /set max_tokens N allows more"
        else:
            cause = "the context is reached; /clear starts over"
        self._terminal.say(f"[The answer was cut off: {cause}.]\n")

    def _all_messages(self) -> Messages:
        return [*([{"role": "system", "content": self._system}] if self._system else []), *self._messages]

    def _show(self) -> None:
        for name, value in (
            ("model", self._model),
            ("context", f"{self._num_tokens:,} of {self._llm.max_model_len:,} tokens are used"),
            ("messages", f"{len(self._messages)}"),
            ("system message", self._system or "-"),
        ):
            self._terminal.say(f"  {name:<20}{value}")

    def _use_file(self, command: str, name: str) -> None:
        """/save FILE and /load FILE."""
        if not name:
            self._terminal.say(f"{command} needs the name of a file.")
            return
        path = Path(name).expanduser()
        try:
            if command == "/save":
                save(path, self._all_messages(), self._options)
                self._terminal.say(f"The conversation is saved to {path}.")
                return
            messages, options = load(path)
            options = {"max_tokens": None, **options}
            self._params = self._llm.processor.default_sampling_params(chat=True, **options)
        except (ValueError, TypeError, OSError) as error:
            self._terminal.say(error_text(error))
            return
        self._options = options
        self._system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self._messages = messages
        self._num_tokens = 0
        self._terminal.say(f"The conversation of {path} goes on; it has {len(messages)} messages.")

    def _set_multiline(self, argument: str) -> None:
        if argument not in ("on", "off"):
            self._terminal.say('/multiline needs "on" or "off".')
            return
        self._terminal.is_multiline = argument == "on"
        self._terminal.say(f"A message ends with {'an empty line' if argument == 'on' else 'Enter'}.")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            self._terminal.say("The system message is set.")
        else:
            self._terminal.say(self._system or "There is no system message.")

    def _set(self, argument: str) -> None:
        """Reads NAME VALUE. Ollama's "parameter NAME VALUE" and "system TEXT" are accepted, too."""
        argument = argument.removeprefix("parameter ").strip()
        name, _, value = argument.partition(" ")
        name = _OLLAMA_NAMES.get(name, name)
        value = value.strip()
        if name == "system":
            self._set_system(value)
        elif name and name not in PARAMETERS:
            self._terminal.say(f"There is no parameter {name}; the names are {', '.join(PARAMETERS)}.")
        elif value:
            self._change(name, value)
        else:
            for shown in [name] if name else PARAMETERS:
                setting = getattr(self._params, shown)
                self._terminal.say(f"  {shown:<20}{'-' if setting in (None, []) else setting}")

    def _change(self, name: str, value: str) -> None:
        kind, _ = PARAMETERS[name]
        options = {**self._options}
        options.pop(name, None)
        try:
            if value != "default":
                options[name] = kind(value)
            elif name == "max_tokens":
                options[name] = None
        except ValueError:
            self._terminal.say(f"{name} must be {'an integer' if kind is int else 'a number'}, got {value}.")
            return
        try:
            self._params = self._llm.processor.default_sampling_params(chat=True, **options)
        except ValueError as error:
            self._terminal.say(error_text(error))
            return
        self._options = options
        self._terminal.say(f"{name} is {value}.")

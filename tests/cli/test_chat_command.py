"""`quire chat` in a real pseudo-terminal."""

from __future__ import annotations

import io
import json
import shutil
import stat
from pathlib import Path

import pytest

import quire.demo
from quire.cli.main import main
from support.terminal import CTRL_C, CTRL_D, UP, terminal

PROMPT = ">>> "
ENDLESS = ("--ignore-eos", "--temperature", "1.5", "--sampling-seed", "1")


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_or_drops_a_line_and_never_ends_the_program(tmp_path: Path):
    with terminal("chat", *ENDLESS, state=tmp_path) as session:
        assert "Talking to the bundled model. The context has 2,048 tokens." in session.wait_for(PROMPT)
        session.type("Tell me a story.\n")
        session.wait_for("story.\n")
        session.wait_for("\n")  # of the answer, which is longer than a line
        session.type(CTRL_C)
        session.wait_for(PROMPT)
        session.type("half a line")
        session.wait_for("half a line")
        session.interrupt()
        session.wait_for(PROMPT)
        session.interrupt()
        session.wait_for("Ctrl-D or /bye leaves.")
        session.wait_for(PROMPT)
        session.type("/set max_tokens 3\n")
        session.wait_for("max_tokens is 3.")
        session.type("hi\n")
        assert "[The answer was cut off: max_tokens is reached; /set max_tokens N allows more.]" in session.wait_for(
            "]"
        )
        session.wait_for(PROMPT)
        session.type(CTRL_D)
        assert session.end() == 0


@pytest.mark.slow
def test_commands_and_messages_of_several_lines(tmp_path: Path):
    with terminal(
        "chat", "--system", "Be brief.", "--max-tokens", "4", "--temperature", "0", state=tmp_path
    ) as session:
        session.wait_for(PROMPT)
        for typed, answer in (
            ("/help", "forget the conversation"),
            ("/system", "Be brief."),
            ("/system Be kind.", "The system message is set."),
            ("/set parameter temperature 0.5", "temperature is 0.5."),
            ("/set temperature", "  temperature         0.5"),
            ("/set num_predict 5", "max_tokens is 5."),
            ("/set temperature hot", "temperature must be a number, got hot."),
            ("/set top_p 7", "top_p must be in (0, 1], got 7.0."),
            ("/set tmeperature 1", "There is no parameter tmeperature; the names are max_tokens,"),
            ("/set temperature default", "temperature is default."),
            ("/dance", "There is no command /dance; /help lists them."),
            ("/clear", "The conversation starts over."),
            ("/reset", "The conversation starts over."),
            ("/multiline", '/multiline needs "on" or "off".'),
            ("/multiline on", "A message ends with an empty line."),
        ):
            session.type(typed + "\n")
            session.wait_for(answer)
            session.wait_for(PROMPT)
        for typed in ("one\ntwo\n\n", "/multiline off\n", '"""one\ntwo"""\n', "one\\\ntwo\n"):
            if typed.startswith("/"):
                session.type(typed)
                session.wait_for("A message ends with Enter.")
                session.wait_for(PROMPT)
                continue
            session.type(typed)
            session.wait_for("... ")
            session.wait_for("\n\n")
            session.wait_for(PROMPT)
        session.type("\x1b[200~one\ntwo\x1b[201~\n")  # as a terminal pastes
        session.wait_for("\n\n")
        session.wait_for(PROMPT)
        session.type("/bye\n")
        assert session.end() == 0


@pytest.mark.slow
def test_lines_are_remembered_by_the_next_session_for_this_user_only(tmp_path: Path):
    for typed in ("/system A first line.\n", UP + UP + "\n"):
        with terminal("chat", state=tmp_path) as session:
            session.wait_for(PROMPT)
            session.type(typed)
            session.wait_for("The system message is set.")
            session.wait_for(PROMPT)
            session.type("/bye\n")
            assert session.end() == 0
    file = tmp_path / "quire" / "chat_history"
    assert file.read_text().splitlines() == ["/system A first line.", "/bye"] * 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.slow
def test_nothing_is_remembered_with_no_history(tmp_path: Path):
    with terminal("chat", "--no-history", state=tmp_path) as session:
        session.wait_for(PROMPT)
        session.type("/bye\n")
        assert session.end() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_conversation_is_saved_and_goes_on_in_another_session(tmp_path: Path):
    file = tmp_path / "a conversation.json"
    with terminal("chat", "--temperature", "0", "--max-tokens", "7", state=tmp_path) as session:
        for typed, answer in (
            ("/system Be kind.", "is set"),
            ("/show", "0 of 2,048 tokens are used"),
            ("What is 2 plus 3?", "7"),
            ("/show", "  messages            2"),
            (f"/save {file}", f"The conversation is saved to {file}."),
            (f"/save {file}", f"The conversation is saved to {file}."),
            ("/bye", "\n"),
        ):
            session.wait_for(PROMPT)
            session.type(typed + "\n")
            session.wait_for(typed)
            if typed != "What is 2 plus 3?":
                session.wait_for(answer)
        assert session.end() == 0
    saved = json.loads(file.read_text())
    roles = [message["role"] for message in saved["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert saved["temperature"] == 0
    assert saved["max_tokens"] == 7
    with terminal("chat", state=tmp_path) as session:
        session.wait_for(PROMPT)
        session.type(f"/load {file}\n")
        session.wait_for("goes on; it has 2 messages.")
        session.wait_for(PROMPT)
        session.type("/system\n")
        session.wait_for("Be kind.")
        session.type("/set temperature\n")
        session.wait_for("  temperature         0")
        session.type("/bye\n")
        assert session.end() == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("{", "holds no conversation"),
        ("[]", 'holds no conversation: it must be an object with "messages"'),
        ('{"messages": [], "tools": []}', "has a field that quire chat does not know: tools"),
        ('{"messages": [{"role": "tool", "content": ""}]}', "messages[0] must have a role"),
        ('{"messages": [{"role": "user", "content": []}]}', "messages[0] must have a role"),
        ('{"messages": [], "temperature": "hot"}', "temperature"),
        ('{"messages": [], "temperature": -1}', "temperature"),
    ],
)
def test_a_file_that_is_no_conversation_is_an_error_and_is_not_overwritten(
    tmp_path: Path, monkeypatch, capsys, content, problem
):
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    commands = f"/load {file}\n/load\n/show\n"
    if content is not None and "temperature" not in content:
        commands += f"/save {file}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(commands))
    assert main(["chat"]) == 0
    error = capsys.readouterr().err
    assert problem in error
    assert "/load needs the name of a file." in error
    if content is not None:
        assert file.read_text() == content


@pytest.mark.slow
def test_where_no_history_can_be_kept_there_is_none_and_ctrl_c_while_loading_ends_the_program(tmp_path: Path):
    file = tmp_path / "a file"
    file.touch()
    with terminal("chat", state=file) as session:
        session.wait_for(PROMPT)
        session.type("/bye\n")
        assert session.end() == 0
        assert "rror" not in session.screen
    with terminal("chat", state=tmp_path) as session:
        session.type(CTRL_C)
        assert session.end() in (130, -2, 1)  # -2 and 1: before Python has set up its handler, or its paths
        assert PROMPT not in session.screen


def test_without_a_terminal_each_line_is_a_message(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 plus 3?\n/clear\n\nWhat is 2 plus 3?\n"))
    assert main(["chat", "--temperature", "0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert "5" in first


def test_thinking_is_apart_from_the_answer(tmp_path: Path, monkeypatch, capsys):
    template = tmp_path / "template.jinja"
    template.write_text("<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>")
    monkeypatch.setattr("sys.stdin", io.StringIO("Tell me a story.\n"))
    flags = ["--chat-template", str(template), "--reasoning-parser", "qwen3", *ENDLESS, "--max-tokens", "30"]
    assert main(["chat", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert captured.err.partition("[The answer was cut off")[0].strip()


def test_a_missing_chat_template_is_said_before_the_model_is_loaded(tmp_path: Path, monkeypatch, capsys):
    model = tmp_path / "model"
    shutil.copytree(Path(quire.demo.__file__).parent / "model", model)
    (model / "model.safetensors").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["chat", str(model), "--load-format", "dummy"]) == 1
    error = capsys.readouterr().err
    assert "this model has no chat template" in error
    assert "--chat-template FILE" in error
    assert "quire generate" in error
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = [str(model), "--load-format", "dummy", "--chat-template"]
    assert main(["chat", *flags, str(template)]) == 0
    assert main(["chat", *flags, str(tmp_path / "nothing.jinja")]) == 1
    assert "--chat-template" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--temperature=-1", "--top-p=3"])
def test_wrong_sampling_parameters_are_errors_that_name_the_flag(argument, capsys):
    assert main(["chat", argument]) == 1
    assert argument.partition("=")[0] in capsys.readouterr().err

"""`llm`, the command line tool, with the server in its extra-openai-models.yaml."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from question import Question


def ask(question: Question) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        models = [
            {"model_id": "chat", "model_name": question.model},
            {"model_id": "completion", "model_name": question.model, "completion": True},
            {"model_id": "unknown", "model_name": "no"},
        ]
        server = {"api_base": question.url, "api_key_name": "quire"}
        (Path(folder) / "keys.json").write_text(json.dumps({"quire": question.key}))
        yaml = json.dumps([{**model, **server} for model in models])  # JSON is YAML
        (Path(folder) / "extra-openai-models.yaml").write_text(yaml)

        def run(model: str, *arguments: str, prompt: str = question.prompt) -> subprocess.CompletedProcess[str]:
            options = ["-o", "temperature", "0", "-o", "max_tokens", str(question.tokens)]
            return subprocess.run(
                [sys.executable, "-m", "llm", "-m", model, *options, *arguments],
                input=prompt,
                text=True,
                capture_output=True,
                env={**os.environ, "LLM_USER_PATH": folder},
                timeout=600,
            )

        whole, streamed = run("chat", "--no-stream", "--usage"), run("chat", "--usage")
        return {
            "chat": whole.stdout.removesuffix("\n"),
            "chat/stream": streamed.stdout.removesuffix("\n"),
            "chat/async": run("chat", "--async").stdout.removesuffix("\n"),
            "completion": run("completion", "--no-stream").stdout.removesuffix("\n"),
            "completion/stream": run("completion").stdout.removesuffix("\n"),
            "chat usage": usage(whole.stderr),
            "chat usage/stream": usage(streamed.stderr),
            "unknown model": run("unknown").stderr,
            "long prompt": run("completion", prompt=question.long_prompt).stderr,
        }


def usage(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:input|output)", text)]


if __name__ == "__main__":
    Question.answer_with(ask)

"""Answer the requests of an OpenAI batch file. Each line of the input is a request, with custom_id, method, url and
body. Each line of the output is a response. Responses are appended as requests finish, in any order; custom_id
identifies their requests. After an interruption, the same command continues where it stopped. All options of quire
serve are accepted; those for connections have no effect.
"""  # the description of the command in its help

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from quire.cli.flags import add_engine_flags, add_flags, add_log_level, engine_options, server_options
from quire.cli.model import add_model_flag
from quire.config.engine import EngineConfig, ServerConfig
from quire.messages.errors import error_text
from quire.observability.logging import configure_logging
from quire.platform.folders import state_folder

HELP = "answer the requests of an OpenAI batch file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, one JSON object a line; a path, or a URL to read with GET",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers; a path, to which answers are appended, or a URL to write with PUT in the end",
    )
    parser.add_argument(
        "--output-tmp-dir",
        type=Path,
        metavar="DIR",
        help="folder for the answers until they are sent to the output URL (default: the user's state folder)",
    )
    add_model_flag(parser)
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    config = ServerConfig.create(**server_options(arguments))
    configure_logging(arguments.log_level, config.log_format)
    config = replace(
        config, api_key=[], max_waiting_requests=None, middleware=[], root_path="", disable_uvicorn_access_log=True
    )
    if config.response_store is None:  # the answers are in the output, and the user's store is not flooded with them
        config = replace(config, response_store="memory", response_store_bytes=1 << 26)
    target: str = arguments.output_file
    output_file = _file_for(target, arguments.output_tmp_dir) if _is_url(target) else Path(target)
    with ExitStack() as stack:
        input_file = Path(arguments.input_file)
        if _is_url(arguments.input_file):
            download = stack.enter_context(tempfile.NamedTemporaryFile(prefix="quire-batch-", suffix=".jsonl"))
            _get(arguments.input_file, download)
            input_file = Path(download.name)
        _answer(arguments.model, options, config, input_file, output_file)
    if _is_url(target):
        _put(target, output_file)
        output_file.unlink()
    return 0


def _answer(model: str | None, options: dict[str, Any], config: ServerConfig, source: Path, target: Path) -> None:
    from quire.engine.core_client import CoreClient
    from quire.models.heads.resolve import with_files
    from quire.server.batch_files import BatchFiles

    files = BatchFiles(source, target, config.max_body_bytes)
    try:
        if files.num_unanswered:
            engine_config = EngineConfig.create(model=model, **options)
            core = CoreClient(*with_files(engine_config))
            try:
                # Imported here, since importing takes a while. Meanwhile, the core's process imports torch and loads
                # the model.
                from quire.server.batch import run

                run(core, config, files)
            finally:
                core.kill()
    finally:
        files.close()
        num_left = files.num_unanswered
        num_failed = files.num_failed
        rest = f"; the same command goes on with the other {num_left}" if num_left else ""
        print(
            f"{files.num_requests - num_left} requests are answered, {num_failed} with an error{rest}", file=sys.stderr
        )


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _file_for(url: str, folder: Path | None) -> Path:
    """Return the file for the responses, which are uploaded to a URL at the end. The file is the same for each run."""
    folder = folder or state_folder()
    if folder is None:
        raise ValueError("a user without a home needs --output-tmp-dir for an output URL")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"batch-{hashlib.sha256(url.encode()).hexdigest()[:16]}.jsonl"


def _get(url: str, file: IO[bytes]) -> None:
    try:
        with urllib.request.urlopen(url) as response:
            shutil.copyfileobj(response, file)
        file.flush()
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} cannot be read: {error_text(error)}") from error


def _put(url: str, path: Path) -> None:
    headers = {"Content-Type": "application/jsonl", "Content-Length": str(os.path.getsize(path))}
    try:
        with open(path, "rb") as file:
            urllib.request.urlopen(urllib.request.Request(url, file, headers, method="PUT")).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} cannot be written: {error_text(error)}; the same command tries again") from error

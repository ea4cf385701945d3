"""`quire generate`: complete a prompt, and stream the text."""

import argparse
import contextlib
import sys

from quire.cli.flags import engine_options
from quire.cli.model import add_model_flag, check_prompt
from quire.cli.sampling import add_text_flags, sampling_options
from quire.platform.torch_import import quick_imports

HELP = "complete a prompt, and print the text as it is generated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to continue (default: read from standard input)")
    add_model_flag(parser)
    add_text_flags(parser, max_tokens=200)


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    options = engine_options(arguments)
    sampling = sampling_options(arguments)
    if prompt is not None and arguments.model is None:
        check_prompt(prompt)
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError('no prompt; try: quire generate "Once upon a time"')
        prompt = sys.stdin.read().rstrip("\n")
    with quick_imports():
        import quire.engine.before_torch  # noqa: F401  # while torch's library is being loaded
        from quire.config.engine import EngineConfig
        from quire.engine.frontend import Frontend
        from quire.models.heads.resolve import with_files

        config = EngineConfig.create(model=arguments.model, **options)
        frontend = Frontend(*with_files(config), in_process=True)
        from quire.engine.llm import LLM  # imports torch
    llm = LLM.from_frontend(frontend)
    params = llm.processor.default_sampling_params(**sampling)
    outputs = llm.stream(prompt, params)  # raises its errors here, before anything is shown
    sys.stdout.write(prompt)
    shown = 0
    for output in outputs:
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
    sys.stdout.flush()
    llm.shutdown()
    measurement = llm.core.measurement
    if measurement is not None and measurement.is_needed:  # of the machine, once, when the answer has been printed
        with contextlib.suppress(KeyboardInterrupt):
            measurement.finish()
    return 0

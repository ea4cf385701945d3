"""Flags of `vllm bench serve` that `quire bench serve` does not have: accepted without effect, or refused by name."""

import argparse
from typing import Any, NoReturn

# No tokenizer is needed, because prompts are calibrated with the server's token counts. Datasets are read completely.
_WITHOUT_EFFECT = "--tokenizer --tokenizer-mode --timeline-itl-thresholds --lora-assignment".split()
_SWITCHES_WITHOUT_EFFECT = """--trust-remote-code --skip-tokenizer-init --no-stream --no-oversample --skip-chat-template
    --disable-shuffle""".split()
_NEUTRAL = {"--probe-request-rate": ("0", "0.0"), "--random-batch-size": ("1",)}  # accepted only at these values
_REFUSED = """--use-beam-search --profile --self-timed --enable-multimodal-chat --plot-timeline --plot-dataset-stats
    --lora-modules --random-num-replicas --random-mm-base-items-per-request --random-mm-bucket-config
    --sharegpt-output-len --sonnet-input-len --sonnet-output-len --sonnet-prefix-len --hf-subset --hf-split --hf-name
    --hf-output-len --spec-bench-output-len --spec-bench-category --blazedit-min-distance
    --blazedit-max-distance""".split()
DATASETS = ("random", "prefix_repetition", "custom")
_OTHER_DATASETS = """sharegpt burstgpt sonnet random-mm random-rerank hf custom_audio custom_image custom_mm spec_bench
    speed_bench timed_trace""".split()
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_OTHER_BACKENDS = """openai-audio openai-embeddings openai-embeddings-chat openai-embeddings-clip vllm-pooling
    vllm-rerank infinity-embeddings tgi lmdeploy deepspeed-mii sglang""".split()


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise argparse.ArgumentError(None, f"{self.option_strings[0]} is not supported by Quire yet")


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags, without listing them in the help."""
    hidden: Any = {"help": argparse.SUPPRESS, "dest": argparse.SUPPRESS}
    for flag in _SWITCHES_WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, **hidden)
    for flag in _WITHOUT_EFFECT:
        parser.add_argument(flag, default=argparse.SUPPRESS, **hidden)
    for flag, accepted in _NEUTRAL.items():
        parser.add_argument(flag, choices=accepted, default=argparse.SUPPRESS, **hidden)
    for flag in _REFUSED:
        parser.add_argument(flag, nargs="*", action=_Refuse, default=argparse.SUPPRESS, **hidden)


def dataset(text: str) -> str:
    """Checks the name of a dataset, for argparse."""
    return _one_of(text, DATASETS, _OTHER_DATASETS)


def backend(text: str) -> str:
    """Checks the name of a backend, for argparse."""
    return _one_of(text, tuple(BACKENDS), _OTHER_BACKENDS)


def _one_of(text: str, known: tuple[str, ...], unsupported: list[str]) -> str:
    if text in unsupported:
        raise argparse.ArgumentTypeError(f"{text} is not supported by Quire yet; there are {', '.join(known)}")
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return text

"""`quire route train`: a classifier for the semantic router, from labelled texts."""

import argparse
from pathlib import Path
from typing import cast

HELP = "train a classifier for the rules of the semantic router on labelled texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "examples", metavar="FILE", type=Path, help='lines of JSON with "text", "label", and perhaps "group"'
    )
    parser.add_argument("--embedding", metavar="MODEL", required=True, help="the embedding model of the rules")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the classifier, as safetensors")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=256, help="texts are shortened to this length (default: 256)"
    )
    parser.set_defaults(train=True, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    import numpy as np

    from quire.engine.llm import LLM
    from quire.messages.outputs import EmbeddingOutput
    from quire.messages.pooling_params import PoolingParams
    from quire.semantic.embedder import MAX_CHARS
    from quire.semantic.training import read_examples, train

    examples = read_examples(arguments.examples)
    llm = LLM(arguments.embedding, runner="pooling")
    try:
        params = PoolingParams(task="embed", truncate_prompt_tokens=min(arguments.max_tokens, llm.max_model_len))
        outputs = llm.embed([example.text[:MAX_CHARS] for example in examples], pooling_params=params)
    finally:
        llm.shutdown()
    vectors = np.array([cast(EmbeddingOutput, output.outputs).embedding for output in outputs], np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    result = train(examples, vectors, str(arguments.embedding))
    result.classifier.write(arguments.out)
    print(f"{len(examples)} examples; accuracy on held-out ones: {result.accuracy:.1%}")
    width = max(len(label) for label in result.classifier.labels)
    for label, row in zip(result.classifier.labels, result.confusion, strict=True):
        print(f"  {label:{width}}  " + "  ".join(f"{count:5}" for count in row))
    print("(rows: true labels; columns: predicted labels, in the same order)")
    return 0

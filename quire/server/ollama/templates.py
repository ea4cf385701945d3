"""Templates from clients. They are Jinja templates; Ollama itself uses Go templates."""

import re

_GO = re.compile(r"\{\{-?\s*(\.|\$|(if|else|end|range|with|define|block|template)\b)")
GO_TEMPLATE = "is a Go template, as Ollama's models have; Quire takes Jinja templates, as Hugging Face's models have"


def is_go_template(text: str) -> bool:
    return _GO.search(text) is not None

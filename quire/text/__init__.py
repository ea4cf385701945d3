"""Text in and out: tokenizers, chat templates, the way back from token ids. Imports neither torch nor transformers."""

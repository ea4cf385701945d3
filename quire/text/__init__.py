"""Tokenizers, chat templates, and detokenization. Imports neither torch nor transformers."""

"""Byte-level BPE: the expressions that split a text before merging, and readers of vocab.json with merges.txt.

Tokens are spelled in GPT-2's alphabet, with one printable character per byte, as in tokenizer.json.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
)
# The letters of DeepSeek-LLM: letters with case, except those of some scripts.
_WITH_CASE = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001df1e]]"
)


def _gpt_4(numbers: str, mark: str = "") -> str:
    """mark: the class of combining marks, for models that count them as part of a word."""
    word, other = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{mark}]+", rf" ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*"
    return f"{_CONTRACTION}|{word}|{numbers}|{other}|{_SPACES}"


def _gpt_4o(numbers: str, ending: str = "", excluded: str = "", line_ends: str = r"[\r\n/]*") -> str:
    """A word ends before a capital that follows a small letter."""
    capitals = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    smalls = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    first, second = (
        rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}" for word in (f"{capitals}*{smalls}+", f"{capitals}+{smalls}*")
    )
    return rf"{first}|{second}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{_SPACES}"


# Expressions by the names that GGUF files use. Each one splits the pieces of the earlier ones further.
SPLITS = {
    name: splits
    for names, splits in {
        "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
        "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling": (_GPT_2,),
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT_2),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": (_gpt_4(r"\p{N}{1,3}"),),
        "dbrx smaug-bpe glm4 chatglm-bpe": (_gpt_4(r"\p{N}{1,3}"),),
        "qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan megrez solar-open grok-2": (_gpt_4(r"\p{N}"),),
        "qwen35": (_gpt_4(r"\p{N}", r"\p{M}"),),
        "tekken": (_gpt_4o(r"\p{N}"),),
        "gpt-4o llama4 kanana2 minimax-m2": (_gpt_4o(r"\p{N}{1,3}", f"{_CONTRACTION}?"),),
        "kimi-k2": (r"[\p{Han}]+|" + _gpt_4o(r"\p{N}{1,3}", f"{_CONTRACTION}?", r"&&[^\p{Han}]", r"[\r\n]*"),),
        "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"),
        "deepseek-llm": (
            r"[\r\n]", rf"\s?{_WITH_CASE}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
        ),
        "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
        "deepseek-v3 hunyuan-dense joyai-llm": (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3 + _SPACES),
    }.items()
    for name in names.split()
}  # fmt: skip
_COMPOSED = ("qwen2", "qwen35", "command-r", "mpt", "olmo")  # characters are composed first (NFC)


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splits: str | Sequence[str],
    *,
    ignore_merges: bool = False,
    add_prefix_space: bool = False,
) -> Backend:
    """A byte-level BPE tokenizer. Raises ValueError for a merge whose result is not a token.

    splits: a name in SPLITS, or the expressions themselves
    ignore_merges: a word that is itself a token becomes that token, even if no sequence of merges leads to it
    add_prefix_space: put a space in front of the text; works only with GPT-2's expression
    """
    for left, right in merges:
        if left + right not in vocab:  # the library would panic, which is not an Exception
            raise ValueError(f"{left} and {right} are to be merged, but {left}{right} is no token")
    backend = Backend(models.BPE(dict(vocab), list(merges), ignore_merges=ignore_merges))
    if splits in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if add_prefix_space:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    else:
        splits = SPLITS[splits] if isinstance(splits, str) else splits
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def merges_of(tokens: Iterable[str]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that lists only tokens in order of rank, as those of tiktoken and SentencePiece.

    These libraries join the two neighbours whose union has the lowest rank. To reproduce this, a token gets one merge
    for each way to cut it into two tokens. The order of these merges does not matter: wherever a span of a text becomes
    a token, the same steps with the same last cut produce it as if the span stood alone.
    """
    tokens = dict.fromkeys(tokens)
    return [
        (left, right)
        for token in tokens
        for middle in range(1, len(token))
        if (left := token[:middle]) in tokens and (right := token[middle:]) in tokens
    ]


def read_vocab_and_merges(merges: Path, config: dict[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Reads vocab.json and merges.txt from one directory (GPT-2, OPT, Qwen 2), and completes the configuration."""
    if not (vocabulary := merges.with_name("vocab.json")).is_file():
        raise ValueError("there is no vocab.json beside it")
    vocab, pairs = models.BPE.read_file(str(vocabulary), str(merges))
    vocab |= added_ids(config)
    name = family(config) or "gpt-2"
    backend = byte_level(vocab, pairs, name, add_prefix_space=bool(config.get("add_prefix_space")))
    names = ("eos_token", "unk_token", "bos_token" if name == "gpt-2" else "pad_token")
    end = "<|endoftext|>"
    return backend, {**dict.fromkeys(names, end), **config} if end in vocab else config


def family(config: Mapping[str, Any]) -> str | None:
    """The name in SPLITS for models that reveal their expressions only by the name of their tokenizer class."""
    name = str(config.get("tokenizer_class")).lower()
    if name.startswith("qwen"):
        return "qwen2"
    return "kimi-k2" if name.startswith("tiktoken") else None


def added_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """The tokens that tokenizer_config.json adds to the vocabulary: content → id."""
    return {token["content"]: int(token_id) for token_id, token in (config.get("added_tokens_decoder") or {}).items()}

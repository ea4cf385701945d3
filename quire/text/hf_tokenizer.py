"""The tokenizer with the interface of Hugging Face's transformers 5. `LLM.get_tokenizer` returns it."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]

# Arguments of transformers that are accepted with neutral values, without effect (verbose with any value).
_WITHOUT_EFFECT = """text_pair padding truncation max_length stride is_split_into_words return_tensors
    return_token_type_ids return_overflowing_tokens return_special_tokens_mask return_offsets_mapping return_length
    clean_up_tokenization_spaces return_assistant_tokens_mask tokenizer_kwargs verbose""".split()
_NEUTRAL = (None, False, 0, "do_not_pad", "do_not_truncate")
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class BatchEncoding(dict[str, Any]):
    """A dict whose entries are also attributes: {"input_ids": ..., "attention_mask": ...}."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HFTokenizer:
    """Encodes, decodes and applies the chat template as transformers does with the same files.

    bos_token, bos_token_id, and likewise for eos, unk, sep, pad, cls and mask: None if the checkpoint has no such
    token.

    Arguments of transformers that Quire does not support (padding, truncation, return_tensors) raise a ValueError.
    """

    is_fast = True
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None, name_or_path: str = "") -> None:
        """chat_template: replaces the checkpoint's template."""
        self._tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self.name_or_path = name_or_path
        self.special_tokens_map = dict(tokenizer.special_tokens)
        for name in _SPECIAL:
            token = self.special_tokens_map.get(f"{name}_token")
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", None if token is None else tokenizer.token_to_id(token))
        tokens = [*self.special_tokens_map.values(), *tokenizer.extra_special_tokens]
        self.all_special_tokens = list(dict.fromkeys(tokens))
        self.all_special_ids = self.convert_tokens_to_ids(self.all_special_tokens)

    # ---- text to token ids

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any) -> BatchEncoding:
        """{"input_ids", "attention_mask"}: each is a list for one text, and a list of lists for several texts."""
        with_mask = options.pop("return_attention_mask", None) is not False
        _check(options)
        input_ids: Any
        if isinstance(text, str):
            input_ids = self._tokenizer.encode(text, add_special_tokens)
            mask: Any = [1] * len(input_ids)
        else:
            input_ids = [self._tokenizer.encode(item, add_special_tokens) for item in text]
            mask = [[1] * len(ids) for ids in input_ids]
        return BatchEncoding(input_ids=input_ids, **({"attention_mask": mask} if with_mask else {}))

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        _check(options)
        return self._tokenizer.encode(text, add_special_tokens)

    def tokenize(self, text: str, add_special_tokens: bool = False, **options: Any) -> list[str]:
        """Return the tokens of the text as strings. Parts without a token are spelled as in the text."""
        _check(options)
        return self._tokenizer.pieces(text, add_special_tokens)

    # ---- token ids to text

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of a list of ids, or a list of texts for a list of lists. Also accepts arrays and tensors."""
        _check(options)
        ids = _as_list(token_ids)
        if ids and isinstance(ids[0], list | tuple):
            return [self._tokenizer.decode(sequence, skip_special_tokens) for sequence in ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        return [self.decode(_as_list(ids), skip_special_tokens, **options) for ids in sequences]

    # ---- the vocabulary

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added tokens; `len(tokenizer)` includes them."""
        return self._tokenizer.count(with_added_tokens=False)

    def __len__(self) -> int:
        return self._tokenizer.count(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token → id, including added tokens."""
        return self._tokenizer.get_vocab()

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        return {token: token_id for token_id, token in sorted(self._tokenizer.added_tokens.items())}

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or a list of tokens for several ids. None for an id without a token."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set[int]()
        return [self._tokenizer.id_to_token(int(token_id)) for token_id in ids if int(token_id) not in skipped]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or a list of ids for several tokens. An unknown token becomes unk_token_id."""
        if isinstance(tokens, str):
            token_id = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    # ---- chats

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the template to use: chat_template is a template or the name of one. Raises ValueError if there is
        none."""
        templates = self._tokenizer.chat_templates
        named = templates.get("tool_use") if tools and chat_template is None else None
        template = templates.get(chat_template, chat_template) if chat_template is not None else named
        template = template or self.chat_template
        if template is None:
            raise ValueError("the tokenizer has no chat template; give one with chat_template")
        return template

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Return the prompt for a conversation, or a list of prompts for several. Raises ValueError if the template
        fails.

        tokenize=False returns text. Otherwise the result is {"input_ids", "attention_mask"}; with return_dict=False,
        it is only the ids. variables: variables of the template, such as enable_thinking.
        """
        _check({name: variables.pop(name) for name in [*variables] if name in _WITHOUT_EFFECT})
        if any(callable(tool) for tool in tools or ()):
            raise ValueError("tools must be JSON schemas; functions are not supported by Quire")
        template = self.get_chat_template(chat_template, tools)
        is_one = not conversation or isinstance(conversation[0], Mapping)
        chats: Any = [conversation] if is_one else conversation
        variables = {**self.special_tokens_map, **variables, "tools": tools, "documents": documents}
        variables |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        from quire.text.chat_template import render

        prompts = [render(template, chat, **variables) for chat in chats]
        texts: Any = prompts[0] if is_one else prompts
        if not tokenize:
            return texts
        encoding = self(texts, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids


def _check(options: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that only transformers supports, TypeError for unknown arguments."""
    for name, value in options.items():
        if name not in _WITHOUT_EFFECT:
            raise TypeError(f"unexpected argument {name!r}")
        if name != "verbose" and value not in _NEUTRAL:
            advice = "; what is returned are lists, for torch.tensor or numpy.array" if name == "return_tensors" else ""
            raise ValueError(f"{name}={value!r} is not supported by Quire{advice}")


def _as_list(ids: Any) -> Any:
    """Return token ids as a list of Python integers. A single id becomes a list of one."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    return [ids] if isinstance(ids, int) else list(ids)

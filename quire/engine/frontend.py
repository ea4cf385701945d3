"""The text side of an engine: tokenizer, chat template, request validation. The core does the rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.hub import tokenizer_directory
from quire.checkpoints.metadata import load_generation_config, load_tokenizer
from quire.config.conflicts import check
from quire.config.declaration import imported
from quire.config.engine import ConfigError, EngineConfig, ModelConfig
from quire.config.features import Setup
from quire.engine.pooling import Pair, PoolingProcessor
from quire.engine.processor import GGUF_CHAT_DEFAULTS, Processor, Prompt, PromptFields
from quire.lora.files import find_adapter
from quire.messages.errors import error_text
from quire.messages.lora import Adapter, LoRARequest
from quire.models.description import describe
from quire.models.spec import DecoderSpec
from quire.parsing.reasoning import REASONING
from quire.parsing.recognition import recognized
from quire.parsing.suffixes import of_checkpoint

if TYPE_CHECKING:
    from quire.multimodal.processor import MediaProcessor
    from quire.sampling.logits_processors import LogitsProcessor
    from quire.text.chat_template import ChatRendering

Message = Mapping[str, Any]


class Frontend:
    """A model's tokenizer, chat template and limits, and the Processor that uses them.

    It imports torch only for plugins, which are classes that work on tensors, and for transformers models.

    directory: the model's directory or GGUF file. in_process: whether the core runs in this process. Raises ConfigError
    for options that do not fit the model.
    """

    def __init__(self, config: EngineConfig, directory: Path, *, in_process: bool) -> None:
        self.config = config
        self.directory = directory
        m = config.model
        description = describe(directory, m)
        check(Setup(config, model=description.facts))
        self.max_model_len = description.max_model_len
        self.model_type = str(description.config.get("model_type", ""))
        self.tokenizer = load_tokenizer(tokenizer_directory(m, directory))
        self.given_chat_template = _template_text(m.chat_template)
        # The names of the thinking and tool-call formats, if they can be recognized from the chat template.
        reasoning, self.recognized_tools = recognized(self._template(with_tools=True) or "")
        vocabulary = self.tokenizer.get_vocab
        self.reasoning = chosen_parser("reasoning_parser", m.reasoning_parser, reasoning, REASONING, vocabulary)
        self.processor = Processor(
            self.tokenizer,
            self.max_model_len,
            description.spec.vocab_size,
            generation_config(m, directory),
            seed=m.seed,
            max_logprobs=config.sampling.max_logprobs,
            plugins=_plugins(config.sampling.logits_processors),
            in_process=in_process and config.parallel.ranks == 1,
            scheduling_policy=config.scheduler.scheduling_policy,
            reasoning=None if self.reasoning is None else REASONING[self.reasoning],
            compresses=config.cache.compression is not None,
            transfer=config.cache.transfer,
            media=self._media(description.spec),
            chat_defaults=GGUF_CHAT_DEFAULTS if directory.is_file() and m.generation_config == "auto" else {},
            generates=description.pooling is None,
        )
        self.pooling: PoolingProcessor | None = None
        if description.pooling is not None:
            spec = description.spec
            render = self._pair_prompt if self.given_chat_template is not None else None
            self.pooling = PoolingProcessor(
                self.processor, description.pooling, spec.token_types, spec.hidden_size, render
            )
        if m.default_chat_template_kwargs:
            from quire.text.chat_template import RESERVED

            if reserved := sorted(RESERVED.intersection(m.default_chat_template_kwargs)):
                raise ConfigError(f"default_chat_template_kwargs cannot set {reserved[0]!r}")
        if m.override_generation_config:
            try:
                self.processor.default_sampling_params()
            except (ValueError, TypeError) as error:
                raise ConfigError(f"override_generation_config cannot be used: {error_text(error)}") from error

    def _media(self, spec: DecoderSpec) -> "MediaProcessor | None":
        """Return the processor that puts media into prompts, None if the model accepts none. Raises ConfigError."""
        options = self.config.multimodal
        scheduler = self.config.scheduler
        if spec.media is None and not options.enable_prompt_embeds:
            return None
        tokens = scheduler.tokens_of_a_step(gpu=False)  # a lower bound
        limits = options.limits(tokens, min(scheduler.long_prefill_token_threshold or tokens, tokens))
        from quire.multimodal.processor import MediaProcessor  # imports the image library

        return MediaProcessor(spec.media, self.directory, self.tokenizer, limits, options, spec.hidden_size)

    def adapter(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter that a request names. Raises ValueError if it does not exist, or if the engine accepts
        none."""
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
        if not self.config.lora.enable_lora:
            raise ValueError("lora_request needs an engine with enable_lora=True (--enable-lora)")
        return find_adapter(request, self.config.model.download_dir, self.config.model.hf_token)

    @property
    def has_chat_template(self) -> bool:
        return (self.given_chat_template or self.tokenizer.chat_template) is not None

    def _template(self, with_tools: bool) -> str | None:
        """Return the chat template. with_tools: whether it is for conversations with tools; some models have a separate
        template for these."""
        with_tools = with_tools and self.given_chat_template is None
        of_tools = self.tokenizer.chat_templates.get("tool_use") if with_tools else None
        return self.given_chat_template or of_tools or self.tokenizer.chat_template

    def rendering(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        content_format: str | None = None,
        **arguments: Any,
    ) -> "ChatRendering":
        """Return the object that renders a conversation into a prompt. Raises ValueError if there is no chat template.

        content_format: "string", "openai" or "auto"; None uses the option chat_template_content_format.
        """
        from quire.text.chat_template import ChatRendering  # imports jinja2, which many programs do not need

        template = _template_text(chat_template) or self._template(with_tools=bool(arguments.get("tools")))
        if template is None:
            message = "the model has no chat template, so it takes prompts and no messages; chat_template gives it one"
            raise ValueError(message)
        if "developer" not in template:  # OpenAI's newer name of the role "system", which most templates do not support
            renamed = [isinstance(m, Mapping) and m.get("role") == "developer" for m in messages]
            messages = [{**m, "role": "system"} if rename else m for m, rename in zip(messages, renamed, strict=True)]
        options = self.config.model
        variables = {**self.tokenizer.special_tokens, **options.default_chat_template_kwargs, **arguments}
        content_format = content_format or options.chat_template_content_format
        return ChatRendering(template, messages, {**variables, "content_format": content_format})

    def render_chat(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Render a conversation into a prompt. Raises ValueError if there is no chat template, or if it fails."""
        return self.rendering(messages, **arguments).run()

    def _pair_prompt(self, pair: Pair) -> str:
        """Render the texts that a cross-encoder reads, with vLLM's roles. Raises ValueError if the template fails."""
        texts = [{"role": "query", "content": pair.first}, {"role": "document", "content": pair.second}]
        return self.render_chat(texts, **{"add_generation_prompt": False, **pair.variables})

    def chat_prompt(
        self, messages: Sequence[Message], rendering: dict[str, Any], mm_processor_kwargs: Mapping[str, Any] | None
    ) -> Prompt:
        """Return the prompt of a conversation with its media. rendering: the arguments of `render_chat`. Raises
        ValueError."""
        media = self.processor.media
        if media is None:
            return self.render_chat(messages, **rendering)
        messages, parts = media.split(messages)
        data: dict[str, list[Any]] = {}
        uuids: dict[str, list[str | None]] = {}
        for part in parts:
            data.setdefault(part.modality, []).append(media.prepare(part, mm_processor_kwargs))
            uuids.setdefault(part.modality, []).append(part.uuid)
        return PromptFields(
            prompt=self.render_chat(messages, **rendering),
            multi_modal_data=data,
            multi_modal_uuids=uuids,
            mm_processor_kwargs=dict(mm_processor_kwargs or {}),
        )


def chosen_parser(
    option: str,
    name: str | None,
    recognized: str | None,
    known: dict[str, Any],
    vocabulary: Callable[[], Iterable[str]] = tuple,
) -> str | None:
    """Return the name of a parser: the given one, or the recognized one; None if it is unknown or disabled with "none".

    known: the formats by name. A format given by its import path (package.module.FORMAT) is added to them, as is a
    format whose markers have a suffix in this vocabulary. Raises ConfigError if there is no parser of this name.
    """
    if name and ("." in name or ":" in name):
        format = imported(option, name)
        kind = type(next(iter(known.values())))
        if not isinstance(format, kind):
            raise ConfigError(f"{option} {name!r} must be a {kind.__name__}, not of type {type(format).__name__}")
        known[name] = format
    if name and name != "none" and name not in known:
        raise ConfigError(f"{option} must be none or one of {', '.join(sorted(known))}, got {name!r}")
    name = None if name == "none" else name or recognized
    return of_checkpoint(name, known, vocabulary) if name else None


def _template_text(template: str | None) -> str | None:
    """Return the text of a Jinja template given as text or as a file name. Raises ConfigError if it is neither."""
    if template is None or "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template {template!r} is neither a Jinja template nor a readable file") from error


def _plugins(plugins: Sequence[str | type]) -> "list[type[LogitsProcessor]]":
    """Return the user's logits processors, which the Processor uses to check parameters. Raises ConfigError."""
    if not plugins:
        return []
    from quire.sampling.logits_processors import load_plugins  # imports torch

    return load_plugins(plugins)


def generation_config(options: ModelConfig, directory: Path) -> dict[str, Any]:
    """Return the checkpoint's default sampling parameters and end-of-sequence tokens. Raises ConfigError."""
    config: dict[str, Any] = {}
    if options.generation_config == "auto":
        config = load_generation_config(directory)
    elif options.generation_config != "vllm":
        folder = Path(options.generation_config)
        if not (folder / "generation_config.json").is_file():
            raise ConfigError(
                f"generation_config={options.generation_config!r} must be 'auto', 'vllm' or a directory "
                "with a generation_config.json"
            )
        config = load_generation_config(folder)
    return {**config, **options.override_generation_config}

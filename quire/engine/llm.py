"""LLM: the engine as a Python object, with vLLM's interface."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs
from tqdm import tqdm

from quire.config.conflicts import check
from quire.config.engine import EngineConfig
from quire.config.features import Place, Setup
from quire.engine.assemble import dtype_name, make_core
from quire.engine.beam_search import BeamSearchOutput, beam_search
from quire.engine.frontend import Frontend, Message
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import DeltaReader, OutputProcessor
from quire.engine.pooling import Pair, PoolingProcessor, pooling_request_output, tensor_output
from quire.engine.processor import ProcessedRequest, Prompt, as_list, refuse_arguments
from quire.engine.scoring import scoring
from quire.messages.changes import (
    WEIGHT_GROUP,
    JoinGroup,
    LeaveGroup,
    Pause,
    ReadWeights,
    ReceiveWeights,
    TakeWeights,
    sleep,
    wake_up,
)
from quire.messages.engine import FinishReason
from quire.messages.lora import LoRARequest
from quire.messages.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from quire.messages.pooling_params import PoolingParams, PoolingTask
from quire.messages.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.models.heads.resolve import with_files
from quire.observability.profiling.client import start_order, stop_order
from quire.platform.untrusted.limits import BusyError
from quire.text.hf_tokenizer import HFTokenizer

if TYPE_CHECKING:  # imports prometheus_client, which is needed only for statistics
    from quire.observability.engine import EngineMetrics
    from quire.observability.reader import Metric

LoRA = LoRARequest | Sequence[LoRARequest | None] | None  # the adapter of all prompts, or one for each
Progress = bool | Callable[..., Any]  # whether to show a progress bar, or the class to use, such as tqdm


class LLM:
    """A model, its KV cache and a scheduler in this process.

    model: a directory, a .gguf file or a Hugging Face id; None is the bundled model. options: see `quire generate
    --help`, with underscores for dashes. disable_log_stats=False keeps statistics for `get_metrics`, whose names begin
    with metrics_prefix. Raises ConfigError (a ValueError) for unknown or unsupported options.
    """

    _metrics: "EngineMetrics | None" = None

    def __init__(
        self, model: str | None = None, *, disable_log_stats: bool = True, metrics_prefix: str = "quire", **options: Any
    ) -> None:
        config = EngineConfig.create(model=None if model is None else str(model), **options)
        if not disable_log_stats:
            from quire.observability.engine import EngineMetrics

            buckets = config.metrics.buckets
            self._metrics = EngineMetrics(metrics_prefix, str(model or "quire-demo"), buckets=buckets)
        self._start(Frontend(*with_files(config), in_process=True))

    @classmethod
    def from_frontend(cls, frontend: Frontend) -> "LLM":
        """Return an LLM with an existing frontend, for callers that use the frontend before the weights are loaded."""
        llm = cls.__new__(cls)
        llm._start(frontend)
        return llm

    def _start(self, frontend: Frontend) -> None:
        self.config = frontend.config
        self.frontend = frontend
        check(Setup(self.config, place=Place(in_llm=True)))
        self.processor = self.frontend.processor
        self.dtype = dtype_name(self.config, self.frontend.directory)
        self.output_processor = OutputProcessor(self.frontend.tokenizer, self.config.scheduler)
        self.core = make_core(self.config, self.frontend.directory, self.frontend.max_model_len, has_one_user=True)
        self.processor.max_model_len = self.core.scheduler.limits.max_model_len
        self._grown: dict[str, RequestOutput] = {}  # by request id: changed outputs that have not been yielded
        self._ids = map(str, count())  # request ids

    @property
    def max_model_len(self) -> int:
        return self.processor.max_model_len

    # ---- vLLM's interface

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: LoRA = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts together. The outputs have the order of the prompts.

        A prompt is a string, a list of token ids, or a dict. A dict contains "prompt" or "prompt_token_ids" (optionally
        with "cache_salt" and "multi_modal_data": {"image": [...]}), or "prompt_embeds", or "encoder_prompt" and
        "decoder_prompt". sampling_params: one for all prompts, or one for each; None uses the model's defaults.
        lora_request: the adapter of all prompts, or one (or None) for each, with enable_lora=True. priority: one for
        each prompt, the lowest first, with scheduling_policy="priority". tokenization_kwargs: truncate_prompt_tokens,
        truncation_side (as in SamplingParams, for all prompts) and add_special_tokens. Raises ValueError or TypeError
        for a wrong prompt or wrong parameters, before anything runs.
        """
        requests = self._process(as_list(prompts), sampling_params, priority, tokenization_kwargs, lora_request)
        return self._complete(requests, use_tqdm)

    def chat(  # noqa: PLR0913  # vLLM's signature
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRA = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered with the model's chat template.

        lora_request and priority (one for each conversation) and tokenization_kwargs: as for `generate`. Images are
        content parts: {"type": "image_url", "image_url": {"url": ...}}, or {"type": "image_pil", "image_pil": image}.
        mm_processor_kwargs: settings for their preprocessing.
        """
        from quire.text.chat_template import RESERVED  # imports jinja2

        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if reserved := sorted((RESERVED - {"documents"}).intersection(chat_template_kwargs or ())):
            raise ValueError(f"chat_template_kwargs cannot set {reserved[0]!r}")
        rendering: dict[str, Any] = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        rendering |= chat_template_kwargs or {}
        if sampling_params is None:
            sampling_params = self.processor.default_sampling_params(chat=True)
        prompts = [self.frontend.chat_prompt(c, rendering, mm_processor_kwargs) for c in conversations]  # type: ignore
        tokenization = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        return self._complete(self._process(prompts, sampling_params, priority, tokenization, lora_request), use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Pool each prompt into an embedding, scores, or token vectors, returned as the tensor `outputs.data`.

        pooling_task: None uses the model's default task. options: use_tqdm; truncate_prompt_tokens, as in
        PoolingParams; prompt_name, which selects one of the checkpoint's prompts to prepend to each text;
        add_special_tokens. Raises ValueError or TypeError for a wrong prompt, for wrong parameters, and for a model
        that only generates.
        """
        return self._pool(as_list(prompts), pooling_params, pooling_task, **options)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Return the embedding of each prompt as `outputs.embedding`. options: as for `encode`."""
        return self._pool(as_list(prompts), pooling_params, "embed", lambda v: EmbeddingOutput(v.tolist()), **options)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Return the label scores of each prompt as `outputs.probs`. options: as for `encode`."""
        return self._pool(
            as_list(prompts), pooling_params, "classify", lambda v: ClassificationOutput(v.tolist()), **options
        )

    def reward(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Return a reward model's scores for each prompt as the tensor `outputs.data`. options: as for `encode`."""
        return self._pool(as_list(prompts), pooling_params, None, **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the similarity of texts as `outputs.score`: of one text with each of several, or of texts in pairs.

        A cross-encoder reads both texts at once. Embeddings are compared by cosine similarity, and token vectors as in
        ColBERT. chat_template_kwargs: variables of the template that renders the texts for a cross-encoder, such as
        `instruction`. options: as for `encode`.
        """
        firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (data_1, data_2))
        plan = scoring(self._pooling, firsts, seconds, chat_template_kwargs or {})
        outputs = self._pool(plan.prompts, pooling_params, None, lambda values: values, **options)
        values: list[Any] = [output.outputs for output in outputs]
        scores = plan.scores(values)
        return [
            replace(outputs[i], outputs=ScoringOutput(score)) for i, score in zip(plan.sources, scores, strict=True)
        ]

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt found by beam search, best first.

        Raises ValueError for a wrong prompt, and for a beam_width that needs more logprobs than max_logprobs.
        """
        if 2 * params.beam_width > self.processor.max_logprobs:
            raise ValueError(
                f"beam_width={params.beam_width} needs the logprobs of {2 * params.beam_width} tokens; "
                f"max_logprobs is {self.processor.max_logprobs}"
            )
        requests = self._process(as_list(prompts), SamplingParams(max_tokens=1), None)
        if any(request.core_requests[0].media for request in requests):
            raise ValueError("beam_search takes no multi_modal_data, no prompt_embeds and no text of an encoder")
        starts = [(r.prompt_token_ids, r.core_requests[0].cache_salt) for r in requests]
        generate = partial(self.generate, use_tqdm=False)
        outputs = beam_search(starts, params, generate, self.max_model_len, frozenset(self.processor.eos_token_ids))
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            sequence.text = self.frontend.tokenizer.decode(sequence.tokens)
        return outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[RequestOutput]:
        """Complete one prompt. Depending on output_kind, each step yields the output so far (always the same object) or
        its new part, or only the finished output is yielded.

        Leaving the loop early aborts the request. Raises ValueError or TypeError at once, as `generate` does.
        """
        return self._run(self._process([prompt], sampling_params, None, {"add_special_tokens": add_special_tokens}))

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer, with the interface of Hugging Face tokenizers."""
        return self._hf_tokenizer

    def get_metrics(self) -> "list[Metric]":
        """Return a snapshot of the engine's metrics. Raises ValueError unless it was created with
        disable_log_stats=False."""
        if self._metrics is None:
            raise ValueError("no statistics are kept; make the engine with LLM(..., disable_log_stats=False)")
        from quire.observability.reader import snapshot

        return snapshot(self._metrics.registry)

    @property
    def llm_engine(self) -> LLMEngine:
        """Counts of unfinished requests and facts about the model, under vLLM's names."""
        return LLMEngine(self)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a new copy of the defaults in the model's generation_config.json."""
        return self.processor.default_sampling_params()

    def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """Forget all cached prefixes. Returns True, since it cannot fail.

        reset_external: also forget those in CPU memory and on disk.
        """
        self.core.reset_prefix_cache(reset_external)
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and of the weights: see Sleep. Raises ValueError while a stream is
        unfinished."""
        if self.core.has_unfinished:
            raise ValueError("a stream is unfinished; read or close it before the engine sleeps")
        order = sleep(level)
        self.core.carry_out(Pause("keep"))
        self.core.carry_out(order)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again for "weights", "kv_cache", or both (None)."""
        self.core.carry_out(wake_up(tags))

    def update_weights(self, directory: str) -> None:
        """Replace the model's weights with those in a folder and invalidate the cache. If they do not fit the model,
        raises ValueError and changes nothing."""
        self._replace_weights(ReadWeights(directory))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record steps as configured by `profiler_config`. profile_prefix: the prefix of the traces' names. Raises
        ValueError."""
        self.core.carry_out(start_order(self.config, profile_prefix))

    def stop_profile(self) -> None:
        """Write the traces. Raises ValueError if no profile runs, OSError if they cannot be written."""
        self.core.carry_out(stop_order())

    def init_weights_update_group(self, *place: Any, **options: Any) -> None:
        """Join a trainer's process group, as AsyncLLM does."""
        self.core.exchange(JoinGroup(self.config.parallel.ranks, *place, **options)).result()

    def destroy_weights_update_group(self, group_name: str = WEIGHT_GROUP) -> None:
        self.core.exchange(LeaveGroup(group_name)).result()

    def update_weights_from_distributed(self, *tensors: Any, last: bool = True, **options: Any) -> None:
        """Receive tensors from the trainer, as AsyncLLM does."""
        read = ReadWeights(f"received-{token_hex(16)}", received=True) if last else None
        self._replace_weights(read, ReceiveWeights(*tensors, **options))

    def _replace_weights(self, read: ReadWeights | None, receive: ReceiveWeights | None = None) -> None:
        try:
            if receive is not None:
                self.core.exchange(receive).result()
            if read is not None:
                self.core.carry_out(read)
        except ValueError:
            self.core.carry_out(TakeWeights(use=False))
            raise
        if read is not None:
            self.core.carry_out(TakeWeights(use=True))

    def shutdown(self) -> None:
        """End the engine's processes. The object cannot be used afterwards."""
        self.core.shutdown()

    # ---- requests and steps

    @cached_property
    def _hf_tokenizer(self) -> HFTokenizer:
        name = self.config.model.tokenizer or self.config.model.model or "quire-demo"
        return HFTokenizer(self.frontend.tokenizer, self.frontend.given_chat_template, name)

    def _process(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRA = None,
    ) -> list[ProcessedRequest]:
        truncation = dict(tokenization_kwargs or {})
        add_special_tokens = truncation.pop("add_special_tokens", True)
        if unknown := sorted(truncation.keys() - {"truncate_prompt_tokens", "truncation_side"}):
            raise ValueError(f"tokenization_kwargs: {unknown[0]} is not supported by Quire yet")
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(params)} sampling_params")
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(priority)} priorities")
        loras: Sequence[Any] = [lora_request] * len(prompts)
        if isinstance(lora_request, list | tuple):
            loras = lora_request
        if len(loras) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(loras)} lora_requests")
        adapters = [self.frontend.adapter(lora) for lora in loras]
        requests = []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            value = 0 if priority is None else priority[i]
            if truncation and isinstance(param, SamplingParams):
                param = param.clone(**truncation)
            arguments = (prompt, param, value, add_special_tokens, adapters[i])
            requests.append(self.processor.process(next(self._ids), *arguments))
        return requests

    @property
    def _pooling(self) -> PoolingProcessor:
        if self.frontend.pooling is None:
            raise ValueError("this model generates; to make embeddings with it, start it with runner='pooling'")
        return self.frontend.pooling

    def _pool(
        self,
        prompts: Sequence[Prompt | Pair],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        kind: Callable[[Any], Any] = tensor_output,
        *,
        use_tqdm: Progress = True,
        lora_request: Any = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
    ) -> list[PoolingRequestOutput]:
        """kind: converts an array to `outputs`."""
        refuse_arguments(lora_request=lora_request)
        pooling = self._pooling
        each = list(params) if isinstance(params, Sequence) else []
        if not isinstance(params, Sequence):
            each = [PoolingParams() if params is None else params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(each)} pooling_params")
        changes = {"task": task, "truncate_prompt_tokens": truncate_prompt_tokens}
        changes = {name: value for name, value in changes.items() if value is not None}
        requests = []
        process = partial(pooling.process, add_special_tokens=add_special_tokens, prompt_name=prompt_name)
        for prompt, param in zip(prompts, each, strict=True):
            param = structs.replace(param, **changes) if isinstance(param, PoolingParams) else param
            requests.append(process(next(self._ids), prompt, param))
        return [pooling_request_output(output, kind) for output in self._complete(requests, use_tqdm)]

    def _complete(self, requests: list[ProcessedRequest], use_tqdm: Progress) -> list[RequestOutput]:
        for request in requests:  # the parameters are copies, so the caller's do not change
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        finished: dict[str, RequestOutput] = {}
        num_in = num_out = 0
        started = time.monotonic()
        make_bar: Any = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with make_bar(total=len(requests), desc="Processed prompts", dynamic_ncols=True) as bar:
            for output in self._run(requests):
                if output.finished:
                    finished[output.request_id] = output
                    num_in += len(output.prompt_token_ids)
                    num_out += sum(len(c.token_ids) for c in output.outputs)
                    elapsed = max(time.monotonic() - started, 1e-9)
                    bar.set_postfix_str(
                        f"in {num_in / elapsed:.0f} tok/s, out {num_out / elapsed:.0f} tok/s", refresh=False
                    )
                    bar.update()
        return [finished[request.request_id] for request in requests]

    def _run(self, requests: list[ProcessedRequest]) -> Iterator[RequestOutput]:
        """Queue the requests and step until all have finished. Yields a RequestOutput whenever it changed in a way that
        its output_kind reports. Raises ValueError for a request that the engine rejects, and while it sleeps."""
        if self.core.stats.is_sleeping:
            raise ValueError("the engine sleeps; call wake_up")
        try:
            self._queue(requests)
            running = {request.request_id for request in requests}
            deltas = {r.request_id: DeltaReader() for r in requests if r.params.output_kind is RequestOutputKind.DELTA}
            while running:
                changed = [request_id for request_id in self._grown if request_id in running]
                if not changed:
                    self._step()
                for request_id in changed:
                    output = self._grown.pop(request_id)
                    if output.finished:
                        running.discard(request_id)
                        reason = output.outputs[0].stop_reason
                        if output.outputs[0].finish_reason == FinishReason.BAD_REQUEST:
                            raise ValueError(reason)
                        if output.outputs[0].finish_reason == FinishReason.OVERLOADED:
                            raise BusyError(reason)
                    yield deltas[request_id].read(output) if request_id in deltas else output
        finally:  # an error, Ctrl-C, or a caller that stopped reading
            self._withdraw(requests)

    def _queue(self, requests: list[ProcessedRequest]) -> None:
        for request in requests:
            self.output_processor.add(request)
            if self._metrics is not None:
                self._metrics.add(request.core_requests)
            for core_request in request.core_requests:
                self.core.add_request(core_request)

    def _withdraw(self, requests: list[ProcessedRequest]) -> None:
        """Abort unfinished requests, and drop unread outputs."""
        for request in requests:
            aborted = self.output_processor.abort(request.core_requests)
            self.core.abort_requests(aborted)
            if self._metrics is not None:
                self._metrics.abort(aborted)
            self._grown.pop(request.request_id, None)

    def _step(self) -> None:
        """Run one step for all requests. Several streams may be open at once; each takes its own outputs from
        `_grown`."""
        outputs = self.core.step()
        if self._metrics is not None:
            self._metrics.step(outputs, self.core.stats)
        changed, to_abort = self.output_processor.process(outputs)
        self.core.abort_requests(to_abort)
        if self._metrics is not None:
            self._metrics.stop(to_abort)
        self._grown.update((output.request_id, output) for output in changed)

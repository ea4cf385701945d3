"""LLM: the engine as a Python object, with vLLM's interface."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from tqdm import tqdm

from quire.config import EngineConfig
from quire.engine.beam_search import BeamSearchOutput, beam_search
from quire.engine.client import make_core
from quire.engine.frontend import Frontend, Message
from quire.engine.output_processor import DeltaReader, OutputProcessor
from quire.engine.processor import ProcessedRequest, Prompt
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.text.tokenizer import Tokenizer


class LLM:
    """A model, its KV cache and a scheduler in this process.

    model: a directory, a .gguf file, a Hugging Face id, or nothing for the bundled model; `options`: see
    `quire generate --help`, with underscores for dashes. Raises ConfigError (a ValueError) for options that are
    unknown or cannot be met.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = EngineConfig.create(model=None if model is None else str(model), **options)
        self._start(Frontend(config, in_process=True))

    @classmethod
    def from_frontend(cls, frontend: Frontend) -> "LLM":
        """With a text side that is there already, for callers that look at it before the weights are loaded."""
        llm = cls.__new__(cls)
        llm._start(frontend)
        return llm

    def _start(self, frontend: Frontend) -> None:
        self.config, self.frontend = frontend.config, frontend
        self.processor, self._tokenizer = self.frontend.processor, self.frontend.tokenizer
        self.dtype = self.frontend.dtype
        self.output_processor = OutputProcessor(self._tokenizer, self.config.scheduler.stream_interval)
        self.core = make_core(self.config, self.frontend.directory, self.frontend.max_model_len)
        self.processor.max_model_len = self.core.scheduler.limits.max_model_len
        self._grown: dict[str, RequestOutput] = {}  # by request id: outputs that have news for whoever waits for them
        self._num_requests = 0

    @property
    def max_model_len(self) -> int:
        return self.processor.max_model_len

    # ---- vLLM's interface

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts, all at once; the outputs are in their order.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids" (and "cache_salt").
        sampling_params: one for all, or one a prompt; None takes the model's defaults. Raises ValueError or TypeError,
        before anything runs, for a prompt or parameters that are wrong.
        """
        requests = self._process(_as_list(prompts), sampling_params, priority)
        return self._complete(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, in the form that the model's chat template gives them."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        reserved = sorted({"template", "messages", "tools", "content_format"} & set(chat_template_kwargs or {}))
        if reserved:
            raise ValueError(f"chat_template_kwargs cannot set {reserved[0]!r}")
        prompts: list[Prompt] = [
            self.frontend.render_chat(
                conversation,  # type: ignore[arg-type]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                content_format=chat_template_content_format,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._complete(self._process(prompts, sampling_params, None, add_special_tokens=False), use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a beam search finds, best first.

        Raises ValueError for a prompt that is wrong, and for a beam that needs more logprobs than max_logprobs.
        """
        if 2 * params.beam_width > self.processor.max_logprobs:
            raise ValueError(
                f"beam_width={params.beam_width} needs the logprobs of {2 * params.beam_width} tokens; "
                f"max_logprobs is {self.processor.max_logprobs}"
            )
        requests = self._process(_as_list(prompts), SamplingParams(max_tokens=1), None)
        starts = [(r.prompt_token_ids, r.core_requests[0].cache_salt) for r in requests]
        generate = partial(self.generate, use_tqdm=False)
        outputs = beam_search(starts, params, generate, self.max_model_len, self.processor.eos_token_ids)
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            sequence.text = self._tokenizer.decode(sequence.tokens)
        return outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding after each step, as output_kind says: the output so far (the same object,
        growing), what is new, or nothing until it is finished.

        Leaving the loop early aborts the request.
        """
        yield from self._run(self._process([prompt], sampling_params, None, add_special_tokens))

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; a fresh copy."""
        return self.processor.default_sampling_params()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the processes that were started. The object cannot be used afterwards."""
        self.core.shutdown()

    # ---- how

    def _process(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        add_special_tokens: bool = True,
    ) -> list[ProcessedRequest]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(params)} sampling_params")
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(priority)} priorities")
        requests = []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            self._num_requests += 1
            value = 0 if priority is None else priority[i]
            requests.append(
                self.processor.process(str(self._num_requests - 1), prompt, param, value, add_special_tokens)
            )
        return requests

    def _complete(self, requests: list[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        for request in requests:  # their parameters are copies
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        finished: dict[str, RequestOutput] = {}
        num_in = num_out = 0
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for output in self._run(requests):
                if output.finished:
                    finished[output.request_id] = output
                    num_in += len(output.prompt_token_ids)
                    num_out += sum(len(c.token_ids) for c in output.outputs)
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(
                        f"in {num_in / elapsed:.0f} tok/s, out {num_out / elapsed:.0f} tok/s", refresh=False
                    )
                    bar.update()
        return [finished[request.request_id] for request in requests]

    def _run(self, requests: list[ProcessedRequest]) -> Iterator[RequestOutput]:
        """Queue the requests and step until they are over, yielding each RequestOutput whenever it has
        news that its output_kind wants to hear."""
        try:
            for request in requests:
                self.output_processor.add(request)
                for core_request in request.core_requests:
                    self.core.add_request(core_request)
            running = {request.request_id for request in requests}
            deltas = {r.request_id: DeltaReader() for r in requests if r.params.output_kind is RequestOutputKind.DELTA}
            while running:
                mine = [request_id for request_id in self._grown if request_id in running]
                if not mine:
                    self._step()
                for request_id in mine:
                    output = self._grown.pop(request_id)
                    if output.finished:
                        running.discard(request_id)
                    yield deltas[request_id].read(output) if request_id in deltas else output
        finally:  # an error, Ctrl-C, or a caller that stopped reading
            for request in requests:
                self.core.abort_requests(self.output_processor.abort(request.core_requests))
                self._grown.pop(request.request_id, None)

    def _step(self) -> None:
        """One step, for everyone: several streams may be open at once, and each takes its own from `_grown`."""
        changed, to_abort = self.output_processor.process(self.core.step())
        self.core.abort_requests(to_abort)
        self._grown.update((output.request_id, output) for output in changed)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, (str, dict)) or (prompts and all(isinstance(p, int) for p in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

"""vLLM's module of LoRARequest."""

from quire.messages.lora import LoRARequest as LoRARequest

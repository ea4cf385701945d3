"""Low-rank adapters (LoRA): their files, their places in memory, and the requests that wait for them."""

from quire.messages.lora import LoRARequest as LoRARequest

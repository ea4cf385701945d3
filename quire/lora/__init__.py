"""Low-rank adapters (LoRA): their files, where they are in memory, and who waits for them."""

from quire.messages.lora import LoRARequest as LoRARequest

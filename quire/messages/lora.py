"""Low-rank adapters, as users specify them and as part of requests."""

from typing import Any

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """The adapter that a request uses, as in vLLM: its name, a number that has no effect, and its PEFT folder or
    Hugging Face id. The last two fields have no effect either."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter whose files were found. key: hash of their content, so adapters with equal keys are the same."""

    name: str
    key: str
    path: str

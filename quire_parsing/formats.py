"""The formats of tool calls, which formats.toml lists, by the names that vLLM gives them."""

from quire_parsing.calls import ToolFormat, json_calls, pythonic_block, pythonic_calls, tagged_call
from quire_parsing.harmony import harmony
from quire_parsing.tables import formats

_FUNCTIONS = (json_calls, pythonic_block, pythonic_calls, tagged_call, harmony)
TOOLS: dict[str, ToolFormat] = formats(__file__, ToolFormat, _FUNCTIONS)

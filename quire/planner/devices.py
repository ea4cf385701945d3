"""The devices that a plan may use. devices.toml lists their rates with sources."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_GIB = 2**30
_UNITS = {"memory": _GIB, "bandwidth": 1e12, "bf16": 1e12, "int8": 1e12, "fp8": 1e12, "link": 1e9}
_RATES = ("bf16", "int8", "fp8")


@dataclass(frozen=True)
class Kind:
    """The achievable share of the peak rates for a kind of device. The fields are described in devices.toml."""

    memory_share: float
    weight_share: float
    product_share: float
    attention_share: float
    kernel: float
    step: float
    request: float
    graph: float
    launch: float
    exchange: float
    link_share: float
    is_gpu: bool
    kernels: int
    expert_kernels: int


@dataclass(frozen=True)
class Device:
    """A device, in bytes, seconds and operations. rates: operations per second of dense products, by input type. link:
    bytes per second in one direction to the other devices of the machine. All rates are peaks; `kind` has the share
    that is reached."""

    name: str
    memory: float
    bandwidth: float
    rates: Mapping[str, float]
    link: float
    kind: Kind

    @property
    def reached_bandwidth(self) -> float:
        return self.bandwidth * self.kind.memory_share

    @property
    def weight_bandwidth(self) -> float:
        """Return the bytes of weights per second that products with few rows read."""
        return self.bandwidth * self.kind.weight_share

    def products(self, dtype: str) -> float:
        """Return the operations per second that products with inputs of a type reach."""
        return self.rates.get(dtype, self.rates["bf16"]) * self.kind.product_share

    @property
    def attention(self) -> float:
        """Return the operations per second that attention reaches in prefill."""
        return self.rates["bf16"] * self.kind.attention_share


def _read(path: Path) -> tuple[dict[str, Kind], dict[str, Device]]:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = {name: Kind(**fields) for name, fields in tables["kinds"].items()}
    return kinds, {name: _device(kinds, dict(fields)) for name, fields in tables["devices"].items()}


def _device(kinds: Mapping[str, Kind], fields: dict[str, Any]) -> Device:
    kind = kinds[fields["kind"]]
    if "product_share" in fields:
        kind = replace(kind, product_share=fields["product_share"])
    values = {name: fields[name] * unit for name, unit in _UNITS.items() if name in fields}
    rates = {name: values[name] for name in _RATES if name in values}
    return Device(fields["name"], values["memory"], values["bandwidth"], rates, values["link"], kind)


KINDS, DEVICES = _read(Path(__file__).with_suffix(".toml"))
_ALIASES = {
    "H100-SXM": "H100",
    "H200-SXM": "H200",
    "A100-80GB": "A100",
    "A100-SXM": "A100",
    "A100-40": "A100-40GB",
    "A100-80": "A100",
}


def parse_devices(text: str) -> tuple[Device, int]:
    """ "H100x8" -> (the device, 8), and "L4" -> (the device, 1). Raises ValueError for an unknown device or number."""
    match = re.fullmatch(r"(.+?)(?:[x*](\d+))?", text.strip(), re.IGNORECASE)
    name = match[1].upper().replace("_", "-").replace(" ", "-") if match else ""
    found = DEVICES.get(_ALIASES.get(name, name))
    if match is None or found is None:
        near = difflib.get_close_matches(name, DEVICES, n=1, cutoff=0.5)
        raise ValueError(
            f"gpus={text!r} must be a device and a number of them, such as H100x8; known devices are: "
            f"{', '.join(DEVICES)}" + (f"; the nearest is {near[0]}" if near else "")
        )
    count = int(match[2] or 1)
    if not 1 <= count <= 1024:
        raise ValueError(f"gpus={text!r}: the number of devices must be from 1 to 1024")
    return found, count

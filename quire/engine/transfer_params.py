"""The kv_transfer_params of requests and responses, with vLLM's names."""

import ipaddress
from typing import Any

import msgspec

from quire.config.kv_transfer import KVTransferOptions
from quire.messages.errors import error_text
from quire.messages.transfers import TransferParams

_NAME = "kv_transfer_params"
_LONGEST_ID = 256


def read_transfer(
    request_id: str, extra_args: dict[str, Any] | None, options: KVTransferOptions | None
) -> TransferParams | None:
    """Return the request's parameters with a transfer_id; None if there are none, or if they request no transfer.
    Raises ValueError if they are wrong, or if the engine's options do not allow them."""
    given = (extra_args or {}).get(_NAME)
    if not given:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"{_NAME} must be a dict, got {type(given).__name__}")
    try:
        params = msgspec.convert({k: v for k, v in given.items() if v is not None}, TransferParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_NAME}: {error_text(error)}") from error
    for name, allowed in (
        ("do_remote_decode", options is not None and options.produces),
        ("do_remote_prefill", options is not None and options.consumes),
    ):
        if getattr(params, name) and not allowed:
            raise ValueError(
                f"{_NAME}: {name} needs an engine whose kv_transfer_config allows it (docs/disaggregation.md)"
            )
    if len(params.transfer_id) > _LONGEST_ID:
        raise ValueError(f"{_NAME}: transfer_id may have at most {_LONGEST_ID} characters")
    if params.do_remote_prefill:
        _check_producer(params, options)
    if not params.do_remote_prefill and not params.do_remote_decode:
        return None
    return msgspec.structs.replace(params, transfer_id=params.transfer_id or request_id)


def _check_producer(params: TransferParams, options: KVTransferOptions | None) -> None:
    """Raises ValueError if the engine that has the prompt is not named or not allowed."""
    if not params.transfer_id:
        raise ValueError(f"{_NAME}: do_remote_prefill needs the transfer_id of the prompt at the other engine")
    try:
        address = ipaddress.ip_address(params.remote_host)
    except ValueError:
        raise ValueError(f"{_NAME}: remote_host must be an IP address, got {params.remote_host!r}") from None
    networks = None if options is None else options.extra.networks
    if networks is not None and not any(address in network for network in networks):
        raise ValueError(
            f"{_NAME}: remote_host {params.remote_host} is not one of the producers that this server may connect to"
        )
    if not 1 <= params.remote_port <= 65535:
        raise ValueError(f"{_NAME}: remote_port must be from 1 to 65535, got {params.remote_port}")


def offer(params: TransferParams | None, options: KVTransferOptions | None) -> dict[str, Any] | None:
    """Return the kv_transfer_params for the response: a request to another engine can use them to continue from this
    prompt. None if the prompt is not offered."""
    if params is None or options is None or not params.do_remote_decode:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": params.transfer_id,
        "remote_host": options.kv_ip,
        "remote_port": options.kv_port,
        "remote_engine_id": options.engine_id,
    }

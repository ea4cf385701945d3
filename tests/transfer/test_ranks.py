"""Ranks of real models: their layouts, the servers that the options start, and blocks that go from one to another."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cluster.secret import ClusterSecret, NoSecret, transfer_secret
from quire.config.engine import ConfigError, EngineConfig
from quire.config.kv_transfer import PRIVATE_NETWORKS
from quire.kv.specs import CacheEntry
from quire.messages.transfers import Peer, Transfer
from quire.parallel.mesh import Mesh
from quire.transfer.layout import plan
from quire.transfer.sources import ask
from quire.transfer.store import PeerStore
from quire.worker.worker import Worker
from support.kv_peers import heads

_SECRET = "0123456789abcdef" * 4


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(_SECRET)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def port() -> Iterator[int]:
    """Of which the next one is free, too."""
    for start in itertools.count(12_000 + os.getpid() % 10_000 * 2, 2):  # tests run in several processes
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", start))
                second.bind(("127.0.0.1", start + 1))
            except OSError:
                continue
        yield start
        return


def _worker(path: Path, secret_file: str, transfer: dict[str, Any], **options: Any) -> Worker:
    config = EngineConfig.create(
        model=str(path),
        num_gpu_blocks_override=10,
        max_model_len=96,
        max_num_seqs=2,
        kv_transfer_config=transfer,
        cluster_secret_file=secret_file,
        **options,
    )
    return Worker(config, path, 96, Mesh())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["QuireConnector", "TcpConnector"])
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("qwen3", {}),
        ("gemma3", {"kv_cache_dtype": "int8"}),
        ("deepseek_v3", {"attention_backend": "reference"}),
        ("glm_moe_dsa-shared-selections", {}),
    ],
)
def test_a_rank_reads_blocks_of_another(
    checkpoints: Any, secret_file: str, port: int, variant: str, options: dict[str, Any], transport: str
) -> None:
    path, dice = checkpoints.path(variant), np.random.default_rng(0)
    ours = _worker(path, secret_file, {"kv_role": "kv_producer", "kv_port": port}, **options)
    theirs = _worker(path, secret_file, {"kv_role": "kv_consumer", "kv_connector": transport}, **options)
    assert ours.transfers is not None
    assert theirs.transfers is not None
    try:
        store = theirs.transfers._stores[-1]
        assert isinstance(store, PeerStore)
        assert store.server is None
        layout = store._layout
        for group, layer, head, offset, size in heads(layout):
            role, number = head.split()
            spec = theirs.kv_cache.specs[group]
            index = spec.entries.index(CacheEntry(layer, role))
            backend = theirs.plan.backends[group]
            start = sum(backend.entry_bytes(entry.role) for entry in spec.entries[:index])
            view = backend.of_role(role).view_at(theirs.kv_memory.blocks, start)[3, int(number)]
            assert view.numel() * view.element_size() == size
            assert view.data_ptr() == theirs.kv_memory.blocks[3].data_ptr() + offset

        blocks = ours.kv_memory.blocks.numpy()
        blocks[1:] = dice.integers(0, 255, blocks[1:].shape, np.uint8)
        hello = ask("127.0.0.1", port + 1, ClusterSecret(_SECRET.encode()))
        assert hello.layout == layout
        assert hello.num_blocks == 10
        groups = len(layout.groups)
        keys = [(i % groups, b"%d" % i) for i in range(4)]
        order = Transfer(1, 0, True, [5, 1, 2, 9], keys, [8, 3, 9, 1], Peer(hello.name, "127.0.0.1", (port + 1,)))
        assert theirs.transfers.submit(order).result() == []
        for block, slot, (group, _) in zip(order.block_ids, order.slots, keys, strict=True):
            for _, start, length in plan(layout, [layout], 0)[group][0]:
                got = theirs.kv_memory.blocks[block, start : start + length].numpy()
                assert (got == blocks[slot, start : start + length]).all()
    finally:
        theirs.transfers.close()
        ours.transfers.close()
    with pytest.raises(OSError, match="refused"):
        ask("127.0.0.1", port + 1, ClusterSecret(_SECRET.encode()))


def test_a_port_in_use_is_named(checkpoints: Any, secret_file: str, port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(ConfigError, match=rf"rank 0 cannot listen at kv_ip=127.0.0.1, port {port + 1}"),
    ):
        _worker(checkpoints.path("qwen3"), secret_file, {"kv_port": port})


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({"kv_connector_extra_config": {"streams": 0}}, "streams must be a number from 1 to 16, got 0"),
        ({"kv_connector_module_path": "no_such_module"}, "no_such_module.ranks cannot be imported"),
    ],
)
def test_options_that_are_wrong(checkpoints: Any, secret_file: str, transfer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _worker(checkpoints.path("qwen3"), secret_file, {"kv_role": "kv_consumer", **transfer})


def test_a_connector_whose_library_is_missing(
    checkpoints: Any, secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.transfer.nixl_reads.NixlMemory.make", lambda _: None)
    with pytest.raises(ConfigError, match="'NixlConnector' needs NIXL"):
        _worker(checkpoints.path("qwen3"), secret_file, {"kv_role": "kv_consumer", "kv_connector": "NixlConnector"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster_secret_file": None}, "kv_transfer_config needs cluster_secret_file"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size divides"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size divides"),
        ({"kv_compression": {"ratio": 2}}, "kv_compression gives blocks another meaning"),
        ({"speculative_config": {"method": "draft_model", "model": "x", "num_speculative_tokens": 2}}, "drafters on"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "run a server on each machine"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "nnodes divides them"),
        ({"distributed_executor_backend": "ray"}, "Ray decides that"),
    ],
)
def test_options_that_exclude_each_other(secret_file: str, options: dict[str, Any], message: str) -> None:
    settings = {"cluster_secret_file": secret_file, "kv_transfer_config": {"kv_role": "kv_producer"}, **options}
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(**settings)


def test_each_replica_of_a_producer_has_ports_of_its_own(secret_file: str) -> None:
    config = EngineConfig.create(
        kv_transfer_config={"kv_role": "kv_both", "kv_port": 20_000},
        cluster_secret_file=secret_file,
        tensor_parallel_size=2,
        data_parallel_size=3,
    )
    options = [config.at_replica(replica).cache.transfer for replica in range(3)]
    assert [option and option.kv_port for option in options] == [20_000, 20_003, 20_006]


def test_a_consumer_may_have_replicas(secret_file: str) -> None:
    options = {"kv_transfer_config": {"kv_role": "kv_consumer"}, "data_parallel_size": 2}
    EngineConfig.create(cluster_secret_file=secret_file, **options)


def test_the_configuration_for_nixl_of_vllm_is_accepted_as_it_is_if_the_operator_trusts_the_network() -> None:
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="use insecure_transfers instead"):
        EngineConfig.create(kv_transfer_config=given)
    config = EngineConfig.create(kv_transfer_config=given, insecure_transfers=True)
    transfer = config.cache.transfer
    assert transfer is not None
    assert transfer.produces
    assert transfer.consumes
    assert transfer.extra.producers == PRIVATE_NETWORKS
    assert isinstance(transfer_secret(config), NoSecret)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"kv_ip": "192.168.1.5", "kv_connector_extra_config": {"producers": ["10.9.0.0/16", "fd00::/8"]}}, None),
        ({"kv_connector_extra_config": {"producers": ["10.9.0.0/16", "100.64.0.0/10"]}}, "100.64.0.0/10"),
        ({"kv_connector_extra_config": {"producers": ["0.0.0.0/0"]}}, "0.0.0.0/0"),
        ({"kv_ip": "203.0.113.5"}, "kv_ip=203.0.113.5"),
    ],
)
def test_transfers_without_a_secret_stay_in_private_networks(fields: dict[str, Any], refused: str | None) -> None:
    expected = nullcontext() if refused is None else pytest.raises(ConfigError, match=f"and not with {refused};")
    with expected:
        EngineConfig.create(kv_transfer_config=fields, insecure_transfers=True)

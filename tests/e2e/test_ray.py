"""An engine on a Ray cluster of several nodes: what it says, and that streams go on when a node is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.async_llm import AsyncLLM
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from support.engines import generate, make_llm, tokens_of
from support.nodes import ADDRESSES, Machines, OnMachine, two_machines
from support.ray_cluster import Cluster, ray_cluster
from support.server_process import Server
from support.streams import MODEL, all_streams, expected_streams
from support.waiting import LONGEST, eventually

pytestmark = pytest.mark.slow

OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M"]
SERVED = ["--served-model-name", MODEL, *OPTIONS]
RANKS = ["-tp", "2", "--distributed-executor-backend", "ray"]
REPLICAS = ["-dp", "2", "--data-parallel-backend", "ray"]
EXAMPLES = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, str]]:
    return expected_streams(max_model_len=512)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(nodes=3) as cluster:
        yield cluster


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [pytest.param(RANKS, id="ranks"), pytest.param(REPLICAS, id="replicas")])
def test_streams_go_on_when_a_node_is_lost(cluster, expected, options):
    with Server(*SERVED, *options, start_timeout=600, RAY_ADDRESS=cluster.address) as server:
        assert len(cluster.used()) == 2
        assert asyncio.run(all_streams(server.url, lambda: cluster.kill_node(1))) == expected
        server.wait_until_idle()
    cluster.add_node()


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="ranks"), pytest.param({"data_parallel_backend": "ray"}, id="ranks and replicas")]
)
def test_replicas_whose_ranks_are_actors_share_experts_and_are_lost_together(cluster, checkpoints, options):
    """Ranks of all replicas meet. If the cores are on this machine, a node is lost, and the ranks are placed again."""
    path = checkpoints.path("qwen3_moe")
    prompts = [[5 + i, 7, 9, 11 + i] for i in range(8)]
    cumulative = RequestOutputKind.CUMULATIVE
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, output_kind=cumulative)
    expected = tokens_of(generate(make_llm(path), prompts, [params] * len(prompts)))

    async def answer(llm: AsyncLLM, name: str, prompt: list[int]) -> RequestOutput:
        async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
            last = output
        return last

    async def check() -> None:
        small = {"dtype": "float32", "max_model_len": 176, "max_num_seqs": 32}
        shared = {"data_parallel_size": 2, "enable_expert_parallel": True, "distributed_executor_backend": "ray"}
        llm = AsyncLLM(path, **small, **shared, **options)
        try:
            await llm.start()
            assert len(cluster.used()) >= 2
            for killed in [False] if options else [False, True]:
                made = [answer(llm, f"{killed} {number}", prompt) for number, prompt in enumerate(prompts)]
                tasks = [asyncio.create_task(one) for one in made]
                if killed:
                    while not llm.client.stats.generated_tokens:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(cluster.kill_node, 1)
                assert tokens_of(await asyncio.wait_for(asyncio.gather(*tasks), LONGEST)) == expected
        finally:
            await llm.shutdown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        asyncio.run(check())
    if not options:
        cluster.add_node()


@pytest.mark.nightly
def test_a_deployment_of_ray_serve_says_what_an_engine_says(cluster, expected):
    pytest.importorskip("ray.serve", reason='needs Ray Serve: pip install "ray[serve]"')
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "examples.ray_serve:application"]
    names = [name.removeprefix("--").replace("-", "_") for name in SERVED[::2]]
    arguments = [f"{name}={value}" for name, value in zip(names, SERVED[1::2], strict=True)]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, *arguments], cwd=EXAMPLES, env=environment)
    try:
        url = "http://127.0.0.1:8000"
        eventually(lambda: asyncio.run(all_streams(url)) == expected)
    finally:
        process.terminate()
        process.wait(LONGEST)


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines with a node of a Ray cluster each."""
    pytest.importorskip("ray", reason='needs Ray: pip install ".[ray]"')
    # The paths of Ray's sockets are long, so that of the folder must be short.
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder, two_machines(Path(folder)) as machines:
        for number, machine in enumerate(machines.both):
            role = ["--head", "--port", "6379", "--include-dashboard=false"]
            done = subprocess.run(
                [
                    *machine.prefix,
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    "--num-cpus",
                    "1",
                    "--node-ip-address",
                    ADDRESSES[number],
                    *(["--address", f"{ADDRESSES[0]}:6379"] if number else role),
                ],
                env={**os.environ, **machine.environment, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=LONGEST,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        yield machines


@pytest.mark.nightly
@pytest.mark.parametrize("options", [pytest.param(RANKS, id="ranks"), pytest.param(REPLICAS, id="replicas")])
def test_a_cluster_of_two_machines_goes_on_after_the_link_was_cut(machines, expected, options):
    def cut() -> None:
        machines.lose_packets(100)
        time.sleep(10)
        machines.lose_packets(0)

    names = ["--host", machines.host, *SERVED, *options]
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{ADDRESSES[0]}:6379"}
    with OnMachine(machines[0], *names, own_files=False, **environment) as server:
        assert asyncio.run(all_streams(server.url, cut)) == expected
        assert asyncio.run(all_streams(server.url)) == expected

"""The examples for clusters say what Quire's command line accepts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from quire.cli.flags import engine_options, server_options
from quire.cli.main import build_parser
from quire.config.engine import EngineConfig, ServerConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_kuberay_manifest_has_options_and_machines_that_fit_each_other():
    job, service = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "quire"
    given = build_parser().parse_args(arguments)
    engine = EngineConfig.create(**engine_options(given))
    server = ServerConfig.create(**server_options(given))
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    (head_container,) = head["template"]["spec"]["containers"]
    (worker_container,) = workers["template"]["spec"]["containers"]
    assert engine.cluster.distributed_executor_backend == "ray"
    gpus = int(worker_container["resources"]["limits"]["nvidia.com/gpu"])
    assert engine.parallel.ranks == workers["replicas"] * gpus
    assert engine.parallel.tensor_parallel_size == gpus  # of one machine, where links are fast
    assert workers["minReplicas"] == workers["replicas"] < workers["maxReplicas"]
    assert server.host == "0.0.0.0"
    assert head_container["ports"] == [{"containerPort": server.port, "name": "http"}]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert service["spec"]["selector"] == head["template"]["metadata"]["labels"]
    assert head_container["image"] == worker_container["image"]
    assert [env["name"] for env in head_container["env"]] == ["QUIRE_API_KEY"]
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        mounted: dict[str, Any] = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted["models"] == engine.model.download_dir
        assert set(mounted) == {volume["name"] for volume in group["template"]["spec"]["volumes"]}

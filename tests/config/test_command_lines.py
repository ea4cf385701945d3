"""Command lines as vLLM's documentation has them, with `quire` for `vllm` and the bundled model for theirs.

Each is parsed and checked here; a few start a real server, and the rest do so among the slow tests.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.flags import engine_options, server_options
from quire.cli.main import build_parser
from quire.config.engine import ConfigError, EngineConfig, ServerConfig
from support.server_process import Server
from support.waiting import LONGEST

SMALL = ["--kv-cache-memory-bytes", "64M", "--cpu-isa", "native"]

STARTS = [
    "",
    "--dtype auto --api-key token-abc123",
    "--served-model-name small another --max-model-len 1024",
    "--dtype half --enforce-eager --max-num-seqs 16",
    "--max-model-len 1k --gpu-memory-utilization 0.95 --trust-remote-code",
    "--max_model_len=1K --max_num_seqs=8",
    "--max-model-len auto",
    "-tp 2 --distributed-executor-backend mp --enforce-eager",
    "--tensor-parallel-size 1 --pipeline-parallel-size 1 --data-parallel-size 1",
    "--enable-chunked-prefill --max-num-batched-tokens 2048",
    "--max-num-batched-tokens 128",
    "--long-prefill-token-threshold 128 --max-num-partial-prefills 1 --max-long-partial-prefills 1",
    "--enable-prefix-caching --prefix-caching-hash-algo sha256_cbor",
    "--no-enable-prefix-caching --scheduling-policy priority",
    "--kv-cache-dtype fp8_e4m3 --calculate-kv-scales",
    "--kv-cache-dtype bfloat16 --block-size 32",
    "--attention-backend FLASH_ATTN",
    "--attention-backend TRITON_ATTN --swap-space 16 --disable-custom-all-reduce",
    "--generation-config vllm",
    '--override-generation-config \'{"temperature": 0.6, "top_p": 0.9}\'',
    "--default-chat-template-kwargs '{\"enable_thinking\": false}' --chat-template-content-format string",
    '--compilation-config \'{"cudagraph_mode": "FULL"}\'',
    "-O3 --max-seq-len-to-capture 8192",
    "-cc.mode 3 -cc.cudagraph_capture_sizes+ 1,2,4",
    "--limit-mm-per-prompt '{\"image\": 0}' --mm-processor-cache-gb 0",
    '--allowed-origins \'["*"]\' --allowed-methods \'["GET", "POST"]\' --allow-credentials',
    "--uvicorn-log-level=warning --disable-log-requests --disable-log-stats --disable-uvicorn-access-log",
    "--enable-log-requests --max-log-len 100 --enable-force-include-usage --return-tokens-as-token-ids",
    "--response-role assistant --enable-request-id-headers --enable-prompt-tokens-details --root-path /llm",
    "--load-format runai_streamer --model-loader-extra-config '{\"concurrency\": 16}'",
    "--tokenizer-mode auto --runner generate --convert none --seed 0 --device cpu --max-logprobs 50",
    "--quantization int8 --logprobs-mode processed_logprobs",
    "--enable-auto-tool-choice --tool-call-parser hermes",
    "--reasoning-parser deepseek_r1",
    "--no-enable-lora --no-enable-expert-parallel --cpu-offload-gb 0 --api-server-count 1",
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 5}\'',
    "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
    "--enable-lora --lora-modules rhyme=quire-demo/rhyme --max-loras 4 --max-lora-rank 64",
]
NEW_HERE = [  # what a test of one feature starts
    "--task embed",
    "--no-enable-chunked-prefill",
    "-dp 2 -ep --enable-eplb --num-redundant-experts 32 --eplb-step-interval 1000",
    "--kv-cache-dtype fp8_per_token_head -dp 8 -ep --all2all-backend deepep_low_latency",
    '--compilation-config \'{"mode": 3, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2]}\'',
    "-cc.mode=1 -O2 --cudagraph-capture-sizes 1 2 4 --max-cudagraph-capture-size 64",
    '--media-io-kwargs \'{"video": {"num_frames": 40}}\' --limit-mm-per-prompt \'{"video": {"count": 1}}\'',
    "--quantization fp8 --lora-target-modules q_proj v_proj --device-memory-utilization 0.8",
    "--kv-offloading-size 4 --kv-offloading-backend native --max-num-active-seqs 16",
]
FOR_OTHER_MODELS = [  # with experts, or with fewer KV heads than ranks
    "-dp 8 -ep --enable-eplb --eplb-config '{\"num_redundant_experts\": 32}' --enable-dbo",
    "-tp 8 -dcp 2 --prefill-context-parallel-size 2",
]
NOT_YET = [
    "--tensor-parallel-size 4 --cpu-offload-gb 8",
    "--enable-elastic-ep",
    "--collect-detailed-traces all",
    "--cpu-offload-gb 10",
    "--enable-elastic-ep",
    "--task draft",
    "--tokenizer-mode mistral --config-format mistral",
    "--kv-offloading-size 4 --kv-offloading-backend lmcache",
]
STARTED_ALWAYS = (3, 10)


def configs(line: str) -> tuple[EngineConfig, ServerConfig]:
    given = build_parser().parse_args(["serve", *shlex.split(line)])
    return EngineConfig.create(**engine_options(given)), ServerConfig.create(**server_options(given))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("line", [*STARTS, *FOR_OTHER_MODELS, *NEW_HERE])
def test_a_command_line_of_vllms_is_accepted(line):
    configs(line)


@pytest.mark.parametrize("line", NOT_YET)
def test_a_command_line_that_asks_for_more_says_what_is_not_supported_yet(line):
    with pytest.raises(ConfigError, match="is not supported by Quire yet"):
        configs(line)


@pytest.mark.slow
@pytest.mark.sampled(38)
@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=[] if i in STARTED_ALWAYS else [pytest.mark.slow]) for i, line in enumerate(STARTS)],
)
def test_a_server_starts_with_it(line):
    with Server(*SMALL, *shlex.split(line)) as server:
        assert server.get("/health")[0] == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log


# ---- the documents that this project began with


def test_the_snippets_in_python_run():
    from quire import LLM, SamplingParams

    llm = LLM(model=None, kv_cache_memory_bytes=64 << 20, max_num_seqs=256, enable_chunked_prefill=True)
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
    outputs = llm.generate(["Hello, my name is", "The capital of France is"], sampling_params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["Hello, my name is", "The capital of France is"]
    assert all(isinstance(output.outputs[0].text, str) for output in outputs)
    llm.shutdown()


def test_the_size_of_a_chunk_is_that_of_one_prompt():
    config = EngineConfig.create(max_num_seqs=256, enable_chunked_prefill=True, chunked_prefill_size=1024)
    assert config.scheduler.long_prefill_token_threshold == 1024
    with pytest.raises(ConfigError, match="cpu_offload_gb=2 is not supported by Quire yet"):
        EngineConfig.create(cpu_offload_gb=2, chunked_prefill_size=1024)


def test_the_file_of_options_for_production_is_read(tmp_path: Path, caplog):
    file = tmp_path / "config.yaml"
    options = {"max_model_len": 1024, "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 8192}
    options |= {"max_num_seqs": 256, "enable_prefix_caching": "true", "enable_chunked_prefill": "true"}
    options |= {"num_scheduler_steps": 10, "allowed-origins": '["*"]', "hf-overrides": "{a: 1}", "seed": "null"}
    file.write_text("\n".join(f"{name}: {value}" for name, value in options.items()))
    engine, server = configs(f"--config {file}")
    assert (engine.model.max_model_len, engine.scheduler.max_num_batched_tokens) == (1024, 8192)
    assert (server.allowed_origins, engine.model.hf_overrides) == (["*"], {"a": 1})
    assert "num_scheduler_steps is retired in vLLM" in caplog.text
    file.write_text("enable-elastic-ep: true")
    with pytest.raises(ConfigError, match="enable_elastic_ep is not supported by Quire yet"):
        configs(f"--config {file}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("module", ["quire.entrypoints.api_server", "quire.entrypoints.openai.api_server"])
def test_the_server_has_its_older_names(module):
    command = [sys.executable, "-m", module, "--tensor-parallel-size", "4", "--cpu-offload-gb", "8"]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 1
    assert done.stderr == (
        "quire: error: --cpu-offload-gb 8 is not supported by Quire yet (supported: 0): all weights stay on the "
        "device; only KV blocks can be offloaded (--kv-offloading-size)\n"
    )

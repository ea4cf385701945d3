"""Linux ends a rank that exceeds the memory limit of its cgroup, and streams go on as if nothing had happened."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cgroups import MEMORY, Cgroup, cgroup
from support.fault_requests import SMALL, processes, streams
from support.server_process import Server
from support.waiting import eventually

pytestmark = pytest.mark.slow


def num_kills(limited: Cgroup) -> int:
    for name in ("memory.events", "memory.oom_control"):  # of version 2 and 1
        if (limited.folder / name).exists():
            found = re.search(r"^oom_kill (\d+)$", (limited.folder / name).read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
    return 0


def test_streams_go_on_when_linux_ends_a_rank_that_exceeds_its_memory():
    ranks = ["--tensor-parallel-size", "2"]
    with cgroup("memory", MEMORY, 1 << 20) as limited, Server(*SMALL, *ranks) as server, ThreadPoolExecutor(64) as pool:
        expected = [answer.result() for answer in streams(server, pool, 200)]
        victim = processes(server, "quire.executor.rank")[-1]
        answers = streams(server, pool, 200)
        eventually(lambda: server.metric("num_requests_running") > 0)
        (limited.folder / "cgroup.procs").write_text(str(victim.pid))  # from here on, new memory is counted
        began = time.monotonic()
        while not num_kills(limited):
            answers += streams(server, pool, 200)  # what takes more memory
            time.sleep(0.5)
        print(f"killed {time.monotonic() - began:.1f} s after the limit was set")
        assert [answer.result() for answer in answers] == expected * (len(answers) // len(expected))
        print(f"all {len(answers)} streams had ended {time.monotonic() - began:.1f} s after the limit was set")
        assert server.log.count("Engine core 0 was lost") == 1
        assert not victim.is_running()
        server.wait_until_idle()

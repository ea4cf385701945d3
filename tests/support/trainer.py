"""A trainer: a process that broadcasts a checkpoint's tensors, as rank 0 of a process group.

It makes its group as RL frameworks do, by torch's own function for groups that have a name.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def described(folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of /update_weights for the weights of a checkpoint, or for some of them."""
    fields: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in names or tensors.keys():
                part = tensors.get_slice(name)
                if part.get_dtype() not in TYPES:  # a mask, which is no weight
                    continue
                fields["names"].append(name)
                fields["dtypes"].append(TYPES[part.get_dtype()])
                fields["shapes"].append(part.get_shape())
    return fields


class Trainer:
    """world_size: with the engine's ranks. group: the name of the process group."""

    def __init__(self, world_size: int, group: str = "weight_update_group", timeout: float = 1200.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        arguments = [str(self.port), str(world_size), group, str(timeout)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "listening\n"
        self.place = {"master_address": "127.0.0.1", "master_port": self.port, "world_size": world_size}

    def send(self, folder: Path, names: Sequence[str] = (), die_after: int | None = None) -> dict[str, Any]:
        """Begin to broadcast tensors. Returns how they are described. die_after: so many."""
        fields = described(folder, names)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), fields["names"], die_after]) + "\n")
        self.process.stdin.flush()
        return fields

    @property
    def result(self) -> str:
        """What has become of the oldest `send`: "sent", or an error."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    import os
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _new_process_group_helper

    port, world_size, name, timeout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    store = PrefixStore(name, TCPStore("127.0.0.1", port, world_size, True, wait_for_workers=False))
    print("listening", flush=True)
    group, _ = _new_process_group_helper(
        world_size, 0, [], "gloo", store, group_name=name, timeout=timedelta(seconds=timeout)
    )
    for line in sys.stdin:
        folder, names, die_after = json.loads(line)
        tensors = {n: t for file in Path(folder).glob("*.safetensors") for n, t in load_file(file).items()}
        try:
            for index, tensor in enumerate(names):
                if index == die_after:
                    os._exit(1)
                group.broadcast(tensors[tensor].contiguous(), 0).wait()
            print("sent", flush=True)
        except RuntimeError as error:
            print(f"error: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    main()

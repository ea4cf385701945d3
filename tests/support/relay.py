"""A network link between two machines, as a program: `relay.py NAMESPACE NAMESPACE` carries frames between the devices
`link0` that it makes in both. Lines on its standard input change the link: "loss 100", "delay 0.2". It needs no module
of the kernel that a machine for tests may lack, such as netem."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import threading
import time

TUNSETIFF, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 1 << 16


def open_device(namespace: str) -> int:
    """A device in a network namespace, of which this process is the cable."""
    made: list[int] = []

    def work() -> None:  # a thread can be in another namespace than its process
        place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(place, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", b"link0", TAP | NO_HEADER))
        made.append(device)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return made[0]


def main() -> None:
    ends = [open_device(namespace) for namespace in sys.argv[1:3]]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    loss, delay, number = 0.0, 0.0, 0
    waiting: list[tuple[float, int, int, bytes]] = []  # when to send, a number, the end to which, the frame
    print("ready", flush=True)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], timeout)
        for end in ready:
            if end is sys.stdin:
                words = sys.stdin.readline().split()
                if not words:
                    return
                loss, delay = (float(words[1]), delay) if words[0] == "loss" else (loss, float(words[1]))
                print("done", flush=True)
                continue
            try:
                frame = os.read(end, FRAME_BYTES)
            except OSError:
                continue
            if loss and random.random() * 100 < loss:
                continue
            number += 1
            heapq.heappush(waiting, (time.monotonic() + delay, number, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            try:
                os.write(end, frame)
            except OSError:
                continue  # the device is down


main()

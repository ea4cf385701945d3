"""A tiny server of streams with one thread, which a request stops for a while: python -m support.stalling_server.

It prints its port. A path is what a client asks for: /stream for 100 tokens, one each 5 ms; /sleep/2.5 to sleep for
2.5 s; /compute/2.5 to compute for 2.5 s of processor time; /work/2.5 to do the same in a process below it, which it
awaits; /broken for a stream that ends in the middle.
"""

import asyncio
import subprocess
import sys
import time

BUSY = "import time\nwhile time.process_time() < {}: pass"


def stall(kind: str, seconds: float) -> None:
    """In the thread of the streams."""
    if kind == "sleep":
        time.sleep(seconds)
    elif kind == "work":
        subprocess.run([sys.executable, "-c", BUSY.format(seconds)], check=True)
    else:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    _, kind, *seconds = head.split()[1].decode().split("/")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    if seconds:
        stall(kind, float(seconds[0]))
    tokens = [b"data: a\n\n"] * 100 * (kind == "stream")
    end = [b"data: [DONE]\n\n"] * (kind != "broken")
    for token in tokens + end:
        writer.write(b"%x\r\n%s\r\n" % (len(token), token))
        await writer.drain()
        await asyncio.sleep(0.005)
    writer.write(b"0\r\n\r\n")
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

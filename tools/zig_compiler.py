"""Runs Zig's C++ compiler in place of g++. Its output needs only glibc 2.28, and includes the C++ standard library.

Needs the package ziglang. tools/build_wheel.py names this file in CXX, with the machine: x86_64 or aarch64.
"""

import subprocess
import sys

GLIBC = "2.28"
# Zig keeps frame pointers by default, and clang splits vectors of 512 bits on some processors.
FLAGS = ("-fomit-frame-pointer", "-g0", "-s", "-Wno-unused-command-line-argument")
FLAGS_OF = {"x86_64": ("-mprefer-vector-width=512",), "aarch64": ()}
SPELLINGS = {  # gcc's -> zig's
    "-march=x86-64-": "-march=x86_64_",
    "-march=armv8-a": "-mcpu=generic",
    "-march=armv8.2-a": "-mcpu=generic+v8_2a",
}


def main() -> int:
    machine, *arguments = sys.argv[1:]
    for spelling, zigs in SPELLINGS.items():
        arguments = [argument.replace(spelling, zigs) for argument in arguments]
    flags = [*FLAGS, *FLAGS_OF[machine], *arguments]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}", *flags]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())

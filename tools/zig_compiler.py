"""Zig's C++ compiler in the role of g++: its libraries need no newer glibc than 2.28, and bring the C++ library.

Needs the package ziglang. tools/build_wheel.py names this file in CXX.
"""

import subprocess
import sys

TARGET = "x86_64-linux-gnu.2.28"
# Clang splits vectors of 512 bits on some processors unless it is told not to. Zig keeps frame pointers by default.
FLAGS = ("-mprefer-vector-width=512", "-fomit-frame-pointer", "-g0", "-s", "-Wno-unused-command-line-argument")


def main() -> int:
    arguments = [argument.replace("-march=x86-64-", "-march=x86_64_") for argument in sys.argv[1:]]  # zig's spelling
    return subprocess.run([sys.executable, "-m", "ziglang", "c++", "-target", TARGET, *FLAGS, *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())

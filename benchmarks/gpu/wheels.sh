#!/bin/bash
# Downloads wheels of the packages that Quire needs and the reference image for GPUs lacks:
#
#     benchmarks/gpu/wheels.sh FOLDER [REQUIREMENT ...]
#
# The packages are those of pyproject.toml that image/image_packages.py does not list, with what they require, and the
# given requirements, such as fa3-fwd. benchmarks/gpu/first_contact.sh installs them from the folder on the image.
# PYTHON: the interpreter whose pip downloads them. Fails if the wheels and the repository's files together are larger
# than 64 MiB.
set -euo pipefail

folder=${1:?usage: wheels.sh FOLDER [REQUIREMENT ...]}
shift
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
limit=$((64 * 1024 * 1024))

mapfile -t missing < <("$python" "$here/image/image_packages.py" missing)
tags=(--platform any)
for minor in $(seq 39 -1 5); do  # pip takes each tag literally: a wheel for 2_26 is not found under 2_28
    tags+=(--platform "manylinux_2_${minor}_x86_64")
done
tags+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
mkdir -p "$folder"
rm -f "$folder"/*.whl
"$python" -m pip download -q --only-binary=:all: --implementation cp --python-version 3.12 \
    --abi cp312 --abi abi3 --abi none "${tags[@]}" -d "$folder" "${missing[@]}" "$@"
"$python" "$here/image/image_packages.py" needless "$folder" | xargs -r -d '\n' rm -f

wheels=$(cat "$folder"/*.whl | wc -c)
tree=$(cd "$here/../.." && git ls-files -z | xargs -0 cat | wc -c)
printf '%d wheels, %.1f MiB; with the repository %.1f MiB of 64\n' "$(ls "$folder"/*.whl | wc -l)" \
    "$(echo "$wheels" | awk '{print $1 / 1048576}')" "$(echo "$wheels $tree" | awk '{print ($1 + $2) / 1048576}')"
if ((wheels + tree > limit)); then
    echo "more than 64 MiB" >&2
    exit 1
fi

"""The deferred module of torch is imported as soon as something needs it, and only known versions of torch defer it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire.platform.lean_torch import NEWEST, OLDEST, can_defer

START = """
import sys
from quire.platform import lean_torch
lean_torch.prepare()
import torch
assert "torch._decomp" not in sys.modules
"""
NEEDS = {
    "reading it": "import torch._meta_registrations as m\nassert callable(m.meta_index_Tensor)",
    "importing from it": "from torch._meta_registrations import meta_index_Tensor",
    "tracing": "assert torch.compile(lambda x: x.sin() + 1, backend='eager')(torch.zeros(3)).tolist() == [1, 1, 1]",
    "exporting": (
        "program = torch.export.export(torch.nn.Linear(3, 4), (torch.ones(2, 3),))\n"
        "assert program.module()(torch.ones(2, 3)).shape == (2, 4)"
    ),
    "fake tensors": (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        "    x = torch.ones(4, 6)\n"
        "    assert torch.nn.functional.embedding_bag(torch.ones(2, 3, dtype=torch.long), x).shape == (2, 6)\n"
        "    assert torch.linalg.qr(x)[0].shape == (4, 4)"
    ),
    "the compiler": "import torch._dynamo",
    "references": "import torch._refs\nassert torch._refs.abs",
    "its neighbours": "import torch.utils._content_store, torch._prims",
    "decompositions": "from torch._decomp import decomposition_table\nassert decomposition_table",
}


@pytest.mark.sampled(9)
@pytest.mark.slow
@pytest.mark.parametrize("need", NEEDS)
def test_what_was_deferred_is_there_when_it_is_needed(need):
    code = f"{START}{NEEDS[need]}\nassert hasattr(sys.modules['torch._meta_registrations'], '__file__')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.nightly
def test_generators_of_random_numbers_do_not_need_it():
    code = f"{START}first, second = (torch.Generator().manual_seed(5) for _ in range(2))\n"
    code += "assert torch.equal(torch.rand(9, generator=first), torch.rand(9, generator=second))\n"
    code += "assert 'torch._decomp' not in sys.modules\nimport torch._prims.rng_prims\ntorch.Generator()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_nothing_is_deferred_once_torch_is_imported():
    code = "import torch, sys\nbefore = dict(sys.modules)\n"
    code += "from quire.platform import lean_torch\nlean_torch.prepare()\n"
    code += "assert sys.modules['torch._meta_registrations'] is before['torch._meta_registrations']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_commands_process_imports_torch_leanly():
    code = "import quire.cli.main, sys, torch\nassert 'torch._decomp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_installed_torch_is_one_whose_module_can_be_deferred() -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    assert can_defer(Path(spec.origin).parent)


FILES = {  # of a package that is laid out like torch
    "version.py": "__version__ = '{version}'\n",
    "__init__.py": "from . import _C\nif True:\n    from torch import _meta_registrations\n",
    "_meta_registrations.py": "is_imported = True\n",
    "_prims/__init__.py": "",
    "_prims/rng_prims.py": "\ntorch._C._set_generator_metaclass(OpaqueBaseMeta)\n",
    "_C.py": "",
}
NEXT = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
BEFORE = f"{OLDEST[0]}.{OLDEST[1] - 1}.0"
KNOWN = f"{NEWEST[0]}.{NEWEST[1]}.0+cpu"
OTHER_IMPORT = FILES["__init__.py"].replace("from torch import", "from . import")
OTHER_CALL = FILES["_prims/rng_prims.py"].replace("OpaqueBaseMeta", "SomethingElse")
LAYOUTS = {  # the version, the files that differ, and whether the module is deferred
    "a known version": (KNOWN, {}, True),
    "the oldest version": (f"{OLDEST[0]}.{OLDEST[1]}.0", {"_prims/rng_prims.py": ""}, True),
    "a newer version": (NEXT, {}, False),
    "an older version": (BEFORE, {}, False),
    "a development build": (f"{NEWEST[0]}.{NEWEST[1]}.0a0+git1234567", {}, False),
    "another import of the module": (KNOWN, {"__init__.py": OTHER_IMPORT}, False),
    "another way to allow generators": (KNOWN, {"_prims/rng_prims.py": OTHER_CALL}, False),
    "a package without the file": (KNOWN, {"_prims/rng_prims.py": None}, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unknown_torch_is_imported_as_usual(layout: str, tmp_path: Path) -> None:
    version, differences, is_deferred = LAYOUTS[layout]
    for name, text in {**FILES, **differences}.items():
        if text is not None:
            file = tmp_path / "torch" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(version=version))
    code = (
        "import sys\nfrom quire.platform import lean_torch\nlean_torch.prepare()\nimport torch\n"
        "deferred = sys.modules['torch._meta_registrations']\n"
        "print(not hasattr(deferred, '__file__'), torch._meta_registrations.is_imported)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [str(is_deferred), "True"]

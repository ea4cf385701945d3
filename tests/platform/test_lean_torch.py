"""torch's deferred modules are imported as soon as something needs one, and only known versions of torch defer them."""

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
deferred = [sys.modules[name] for name in lean_torch._DEFERRED]
assert not any(hasattr(module, "__file__") for module in deferred)
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
    "training": (
        "layer = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(layer.parameters())\n"
        "layer(torch.ones(2)).sum().backward()\n"
        "optimizer.step()"
    ),
    "a module within a package": "import torch.nn.quantized.dynamic as dynamic\nassert dynamic.Linear(2, 2)",
    "a part of a package": "from torch.utils.data import TensorDataset\nassert len(TensorDataset(torch.ones(4))) == 4",
    "a nested package": (
        "from torch.utils.data.datapipes.iter import IterableWrapper\nassert list(IterableWrapper([1])) == [1]"
    ),
    "a reference to it": "from torch import optim\nassert optim.Adam is torch.optim.Adam\nassert 'Adam' in dir(optim)",
    "changing it": "torch.optim.extra = 3\nassert sys.modules['torch.optim'].extra == 3",
    "distributions": "assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()",
    "profiling": "with torch.profiler.profile() as profile:\n    torch.ones(2).sum()\nassert profile.key_averages()",
    "quantization": "assert torch.ao.quantization.quantize_dynamic(torch.nn.Linear(4, 4))(torch.ones(4)).shape == (4,)",
    "quantized layers": "assert torch.nn.intrinsic.LinearReLU and torch.nn.qat.Linear and torch.nn.quantizable.LSTM",
    "masked tensors": "assert torch.masked.masked_tensor(torch.ones(2), torch.ones(2) > 0).sum() == 2",
    "quasirandom numbers": "assert torch.quasirandom.SobolEngine(2).draw(3).shape == (3, 2)",
    "scripts": "assert torch.jit.script(torch.nn.Linear(2, 2))(torch.ones(2)).shape == (2,)",
    "several threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "names = ['optim.Adam', 'distributions.Normal', 'ao.quantization.quantize'] * 3\n"
        "def get(name):\n"
        "    package, name = name.split('.', 1)\n"
        "    return getattr(getattr(torch, package), name.split('.')[0])\n"
        "with ThreadPoolExecutor(9) as threads:\n"
        "    assert len(set(threads.map(get, names))) == 3"
    ),
}
ALL = """
for name in lean_torch._DEFERRED:
    package, _, attribute = name.rpartition(".")
    assert hasattr(sys.modules[name], "__file__")
    assert getattr(sys.modules[package], attribute) is sys.modules[name]
"""


@pytest.mark.sampled(9)
@pytest.mark.slow
@pytest.mark.parametrize("need", NEEDS)
def test_what_was_deferred_is_there_when_it_is_needed(need):
    code = f"{START}{NEEDS[need]}\n{ALL}"
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

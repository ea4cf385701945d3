"""What torch defers is there as soon as something needs it."""

import subprocess
import sys

import pytest

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

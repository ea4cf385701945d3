"""The files of an adapter, without a model."""

from __future__ import annotations

import pytest

from quire.lora.files import CONFIG, WEIGHTS, adapter_files


@pytest.mark.parametrize("present", [[], [CONFIG], [WEIGHTS[0]], [WEIGHTS[1]]])
def test_a_folder_without_config_or_weights_is_no_adapter(tmp_path, present):
    for name in present:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"is no PEFT adapter: it needs {CONFIG} and {' or '.join(WEIGHTS)}"):
        adapter_files(tmp_path)


def test_of_two_files_of_weights_the_safe_one_is_read(tmp_path):
    for name in (CONFIG, *WEIGHTS):
        (tmp_path / name).touch()
    assert adapter_files(tmp_path) == (tmp_path / CONFIG, tmp_path / "adapter_model.safetensors")

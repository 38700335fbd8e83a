"""The memory format of batches on a device."""

import pytest
import torch
from torch import nn

from spark_dl import DDP
from spark_dl.parallel.modules import apply_layout, to_device
from tests.builders.models import small_config

BATCH = {
    "image": torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(torch.uint8),
    "video": torch.zeros(2, 3, 4, 5, 6),
    "sound": torch.zeros(2, 3, 4),
    "weight": torch.ones(2),
}


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_get_the_format_and_nothing_else_changes(channels_last):
    config = small_config(1, train={"channels_last": channels_last}, parallel=DDP())
    found = to_device(BATCH, torch.device("cpu"), config)
    assert found.keys() == BATCH.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in BATCH.items())
    assert found["image"].is_contiguous(memory_format=torch.channels_last) == channels_last
    assert all(found[name].is_contiguous() for name in ("video", "sound", "weight"))


def test_a_model_keeps_its_parameters_and_their_names():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    before = dict(model.named_parameters())
    apply_layout(model, small_config(1, train={"channels_last": True, "compile": True}))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() == model.state_dict().keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    assert after["0.weight"].is_contiguous(memory_format=torch.channels_last)

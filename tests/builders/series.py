"""Series that tests of sequences train on: a GRU sees all values of a sample but the last, and says that one."""

import numpy as np
from torch import nn

from spark_dl import ModelSpec

SEQUENCES = {
    "features": ("value",), "label": None, "shuffle_window_rows": 96, "sequence_length": 6, "sequence_stride": 2,
    "sequence_order": "time", "sequence_group": "device",
}  # fmt: skip


def waves(devices, rows):
    """Sine waves of one frequency, each device's from another phase; device by device, in the order of time."""
    time = np.tile(np.arange(rows), devices)
    device = np.repeat(np.arange(devices), rows)
    value = np.sin(0.7 * time + 1.3 * device).astype(np.float32)
    return {"value": value, "time": time, "device": device}


class NextValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 16, batch_first=True)
        self.linear = nn.Linear(16, 1)

    def forward(self, values):
        return self.linear(self.gru(values[:, :-1, None])[0][:, -1]).squeeze(1)


def last_value_loss(output, batch):
    return (output - batch["value"][:, -1]) ** 2


GRU = ModelSpec(build=NextValue, loss=last_value_loss)

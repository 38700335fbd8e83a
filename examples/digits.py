"""The model of `make train`: a small convolutional network for 8 x 8 images of handwritten digits."""

import torch
from torch import Tensor, nn


def build_cnn() -> nn.Module:
    """Images [rows, 64] float32 in [0, 1] -> scores [rows, 10]."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def predict_digit(scores: Tensor) -> dict[str, Tensor]:
    """Scores [rows, 10] -> the columns `prediction` (bigint) and `probability` (array of 10 floats)."""
    return {"prediction": scores.argmax(dim=1), "probability": torch.softmax(scores, dim=1)}


def plot_predictions(rows: list, path: str) -> None:
    """Draws up to 20 predicted digits, wrong ones first."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["prediction"] == row["digit"])[:20]
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    for axes, row in zip(figure.subplots(2, 10).flat, rows, strict=False):
        axes.imshow(torch.tensor(row["image"]).reshape(8, 8), cmap="gray_r")
        is_right = row["prediction"] == row["digit"]
        share = max(row["probability"])
        title = f"{row['prediction']} ({share:.0%})" if is_right else f"{row['prediction']}, is {row['digit']}"
        axes.set_title(title, color="black" if is_right else "red", fontsize=9)
    for axes in figure.axes:
        axes.axis("off")
    figure.savefig(path, dpi=120)

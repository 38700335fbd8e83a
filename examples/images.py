"""A convolutional network, as those for CIFAR-10, on image files in a DataFrame, with augmentation.

The two sample photos of scikit-learn, a temple and a flower, are cut into tiles of 32 x 32 pixels by Spark tasks. The
network learns from which photo a tile is. A vertical stripe of each photo is held out, and tiles that would share
pixels with it are left out.

.venv/bin/python examples/images.py
.venv/bin/python examples/images.py --epochs 30 --ranks 4 --master 'local[4]'
.venv/bin/python examples/images.py --master spark://host:7077 --folder /shared/images

Promise: at least 90 % of the held-out tiles are right; guessing gives 50 %. The exit code is 1 if it is less.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import spark_dl

PHOTOS = ("china.jpg", "flower.jpg")
SIDE, STEP = 32, 16
"""Pixels of the side of a tile, and from one tile to the next."""
STRIPE, HELD_OUT = 128, 2
"""Pixels of the width of a stripe, and the number of the stripe that is held out, of five."""
MOST_SHIFT = 4
"""Pixels by which augmentation shifts a tile at most."""
PROMISED = 0.9


def read_photos(spark: SparkSession) -> DataFrame:
    """The photos: their class `label`, and the file as `content`."""
    import sklearn

    folder = Path(sklearn.__file__).parent / "datasets" / "images"
    rows = [(label, bytearray((folder / name).read_bytes())) for label, name in enumerate(PHOTOS)]
    return spark.createDataFrame(rows, "label BIGINT, content BINARY")


def cut_tiles(photos: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Cuts photos into tiles, each a PNG file. Runs in Spark tasks."""
    from PIL import Image

    for batch in photos:
        rows = []
        for label, content in zip(batch["label"], batch["content"], strict=True):
            photo = Image.open(io.BytesIO(content)).convert("RGB")
            for top in range(0, photo.height - SIDE + 1, STEP):
                for left in range(0, photo.width - SIDE + 1, STEP):
                    file = io.BytesIO()
                    photo.crop((left, top, left + SIDE, top + SIDE)).save(file, "PNG")
                    rows.append((label, top, left, file.getvalue()))
        yield pd.DataFrame(rows, columns=["label", "top", "left", "tile"])


def as_floats(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tiles [rows, 32, 32, 3] uint8 -> [rows, 3, 32, 32] float32 in [-1, 1]."""
    return {**batch, "tile": batch["tile"].permute(0, 3, 1, 2).float() / 127.5 - 1}


def augment(batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Mirrors half of the tiles, shifts each by up to 4 pixels, and changes its contrast and colours. In training only.

    The generator is seeded by epoch, step and rank, so a resumed run draws the same numbers.
    """
    rows = len(batch["tile"])

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(rows, *shape, generator=generator)

    tiles = torch.where(between(0, 1, 1, 1, 1) < 0.5, batch["tile"].flip(3), batch["tile"])
    tiles = tiles * between(0.8, 1.2, 1, 1, 1) + between(-0.15, 0.15, 3, 1, 1)
    padded = nn.functional.pad(tiles, (MOST_SHIFT,) * 4, mode="reflect")
    top, left = torch.randint(0, 2 * MOST_SHIFT + 1, (2, rows), generator=generator).tolist()
    cut = [tile[:, y : y + SIDE, x : x + SIDE] for tile, y, x in zip(padded, top, left, strict=True)]
    return {**batch, "tile": torch.stack(cut)}


def build_cnn() -> nn.Module:
    """Tiles [rows, 3, 32, 32] -> scores [rows, 2]."""

    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 16), *block(16, 32), *block(32, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, len(PHOTOS)),
    )  # fmt: skip


def predict(scores: Tensor) -> dict[str, Tensor]:
    return {"prediction": scores.argmax(dim=1), "probability": scores.softmax(dim=1)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--folder", default="runs/images", help="folder that all hosts reach, for the run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    args = parse()
    spark = spark_dl.build_session("images", master=args.master)
    tiles = read_photos(spark).mapInPandas(cut_tiles, "label BIGINT, top INT, left INT, tile BINARY")
    tiles = tiles.repartition(8).cache()  # every part has tiles of both photos, and so has every rank, for BatchNorm
    first_stripe, last_stripe = f"left DIV {STRIPE}", f"(left + {SIDE - 1}) DIV {STRIPE}"
    test = tiles.filter(f"{first_stripe} = {HELD_OUT} AND {last_stripe} = {HELD_OUT}")
    train = tiles.filter(f"{first_stripe} != {HELD_OUT} AND {last_stripe} != {HELD_OUT}")
    print(f"{train.count()} tiles to train on, {test.count()} held out", flush=True)

    spec = spark_dl.ModelSpec(build=build_cnn, transform=as_floats, augment=augment, predict=predict)
    config = spark_dl.Config(
        data=spark_dl.Data(features=("tile",), label="label", encode={"tile": {"as": "image"}}),
        train=spark_dl.Train(
            epochs=args.epochs,
            global_batch_size=64,
            optimizer="Adam",
            lr=0.004,
            scheduler="CosineAnnealingLR",
            scheduler_args={"T_max": args.epochs},
            metrics={"accuracy": {"class": "MulticlassAccuracy", "num_classes": len(PHOTOS), "average": "micro"}},
        ),
        launch=spark_dl.Launch(num_ranks=args.ranks),
    )
    result = spark_dl.train(train, spec, config, validation=test, run_dir=args.folder, overwrite=True)
    for epoch in result.history:
        accuracy = epoch["metrics"]["accuracy"]
        print(f"epoch {epoch['epoch']}: training loss {epoch['train_loss']:.4f}, held-out accuracy {accuracy:.1%}")

    predicted = spark_dl.predict(test, spec, result.checkpoint)
    predicted.groupBy("label").pivot("prediction", [*range(len(PHOTOS))]).count().orderBy("label").show()
    spark.stop()
    accuracy = result.metrics["accuracy"]
    print(f"accuracy on the held-out tiles: {accuracy:.1%}")
    if accuracy < PROMISED:
        sys.exit(f"error: expected at least {PROMISED:.0%}")


if __name__ == "__main__":
    main()

"""Seven optimizers, and batch sizes with and without learning-rate scaling, compared as trials of one job.

The digits are those of scikit-learn. Each optimizer is tried with three learning rates, and its best one is shown. With
scaling, the learning rate grows with the batch size, as in Goyal et al. 2017. Prints two tables and draws two plots.

.venv/bin/python examples/compare_optimizers.py
.venv/bin/python examples/compare_optimizers.py --parallel-trials 8 --master 'local[8]'
.venv/bin/python examples/compare_optimizers.py --master spark://host:7077 --folder /shared/compare_optimizers
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spark_dl

MOMENTUM = {"momentum": 0.9}
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "SGD": ({"train.optimizer": "SGD"}, (0.1, 0.3, 1.0)),
    "momentum": ({"train.optimizer": "SGD", "train.optimizer_args": MOMENTUM}, (0.03, 0.1, 0.3)),
    "Nesterov": ({"train.optimizer": "SGD", "train.optimizer_args": {**MOMENTUM, "nesterov": True}}, (0.03, 0.1, 0.3)),
    "AdaGrad": ({"train.optimizer": "Adagrad"}, (0.03, 0.1, 0.3)),
    "RMSProp": ({"train.optimizer": "RMSprop"}, (0.003, 0.01, 0.03)),
    "AdaDelta": ({"train.optimizer": "Adadelta"}, (1.0, 3.0, 10.0)),
    "Adam": ({"train.optimizer": "Adam"}, (0.003, 0.01, 0.03)),
}
"""Settings of each optimizer, and the learning rates that are tried."""
BATCH_SIZES = (32, 64, 128, 256, 512)
BASE_BATCH, BASE_LR = 64, 0.1
"""The learning rate of SGD for batches of this size. Scaling multiplies it by (batch size / 64)."""


def all_trials() -> dict[str, dict[str, Any]]:
    """Returns the settings of each trial, by a name."""
    found = {
        f"{name}, lr {lr:g}": {**settings, "train.lr": lr}
        for name, (settings, rates) in OPTIMIZERS.items()
        for lr in rates
    }
    for size in BATCH_SIZES:
        for scaling in (False, True):
            lr = BASE_LR * size / BASE_BATCH if scaling else BASE_LR
            found[batch_name(size, scaling)] = {"train.global_batch_size": size, "train.lr": lr}
    return found


def batch_name(size: int, scaling: bool) -> str:
    return f"batch {size}, lr {'scaled' if scaling else 'constant'}"


def build_network() -> nn.Module:
    """Images [rows, 64] -> scores [rows, 10]."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def read_digits(spark: Any) -> Any:
    """Returns a DataFrame with `image`, 64 floats in [0, 1], and `digit`."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(images, digits, strict=True)]
    return spark.createDataFrame(rows, "image array<float>, digit bigint")


def compare(args: argparse.Namespace) -> dict[str, spark_dl.TrialResult]:
    """Trains all trials in one job. Returns them by name."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spark = spark_dl.build_session(
        "compare_optimizers", master=args.master or f"local[{args.parallel_trials * args.ranks}]"
    )
    settings = all_trials()
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    for name in settings:  # known in advance, so the sampler of the study has nothing to choose
        study.enqueue_trial({"name": name})
    accuracy = {"class": "MulticlassAccuracy", "num_classes": 10, "average": "micro"}
    result = spark_dl.tune(
        read_digits(spark),
        spark_dl.ModelSpec(build=build_network, loss="CrossEntropyLoss"),
        lambda trial: settings[trial.suggest_categorical("name", list(settings))],
        spark_dl.Config(
            data=spark_dl.Data(features=("image",), label="digit"),
            train=spark_dl.Train(
                epochs=args.epochs, validation_fraction=0.2, metrics={"accuracy": accuracy}, log_every=1000
            ),
            launch=spark_dl.Launch(num_ranks=args.ranks),
        ),
        num_trials=len(settings),
        parallel_trials=args.parallel_trials,
        study=study,
        run_dir=f"{args.folder}/run",
        overwrite=True,
    )
    spark.stop()
    return {study.trials[trial.number].params["name"]: trial for trial in result.trials}


def best_of_optimizers(trials: dict[str, spark_dl.TrialResult]) -> dict[str, spark_dl.TrialResult]:
    """Returns the trial of each optimizer with the lowest validation loss."""
    found = {}
    for name, (_, rates) in OPTIMIZERS.items():
        tried = [trials[f"{name}, lr {lr:g}"] for lr in rates]
        found[name] = min(tried, key=lambda trial: torch.inf if trial.value is None else trial.value)
    return found


def print_tables(trials: dict[str, spark_dl.TrialResult]) -> None:
    print(f"{'optimizer':10} {'lr':>6} {'train loss':>10} {'val loss':>8} {'accuracy':>8}")
    for name, trial in best_of_optimizers(trials).items():
        print(f"{name:10} {trial.values['train.lr']:6g} {figures(trial)}")
    print(f"\n{'batch size':10} {'lr':>6} {'train loss':>10} {'val loss':>8} {'accuracy':>8}")
    for size in BATCH_SIZES:
        for scaling in (False, True):
            trial = trials[batch_name(size, scaling)]
            print(f"{size:10} {trial.values['train.lr']:6g} {figures(trial)}{'  scaled' if scaling else ''}")


def figures(trial: spark_dl.TrialResult) -> str:
    if trial.result is None:
        return trial.state
    accuracy = trial.result.metrics["accuracy"]
    return f"{trial.result.train_loss:10.4f} {trial.result.metrics['loss']:8.4f} {accuracy:8.1%}"


def draw(trials: dict[str, spark_dl.TrialResult], folder: Path) -> None:
    """Draws `optimizers.png`, training loss by epoch, and `batch_sizes.png`, validation loss by batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, trial in best_of_optimizers(trials).items():
        losses = [] if trial.result is None else [entry["train_loss"] for entry in trial.result.history]
        axes.plot(range(1, len(losses) + 1), losses, label=f"{name} (lr {trial.values['train.lr']:g})")
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "optimizers.png", dpi=120)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for scaling in (False, True):
        losses = [trials[batch_name(size, scaling)].value for size in BATCH_SIZES]
        axes.plot(BATCH_SIZES, losses, "o-", label=f"learning rate {'x batch size / 64' if scaling else 'constant'}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="batch size", ylabel="validation loss after the last epoch", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "batch_sizes.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", help="Spark master URL (default: local, with a slot for each rank)")
    parser.add_argument("--parallel-trials", type=int, default=2, help="trials at the same time (default: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each trial (default: 1)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs/compare_optimizers", help="folder of the run and the plots")
    args = parser.parse_args()
    trials = compare(args)
    print_tables(trials)
    draw(trials, Path(args.folder))
    print(f"\nplots: {args.folder}/optimizers.png, {args.folder}/batch_sizes.png")


if __name__ == "__main__":
    main()

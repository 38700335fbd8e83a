"""Runs the examples, one after the other, and draws the pictures of `examples.md` from what they leave.

python docs/draw_examples.py            # about 20 minutes on two cores; prints the seconds of each
python docs/draw_examples.py images gpt # some of them
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
FLIGHTS = ("--data", str(ROOT / ".data" / "flights.csv.zip"))
NOTEBOOK = ("-m", "nbconvert", "--to", "notebook", "--execute")
TRAIN = ("-m", "spark_dl", "train", "--config")
COMMANDS: dict[str, tuple[str, ...]] = {
    "quickstart": ("examples/quickstart.py",),
    "run_on_dataframe": ("examples/run_on_dataframe.py",),
    "digits": (*TRAIN, "conf/train/digits.yaml", "--master", "local[2]", "--run_dir", "{folder}/runs"),
    "notebook": (*NOTEBOOK, "examples/notebook.ipynb", "--output-dir", "{folder}"),
    "flights": ("examples/flights.py", *FLIGHTS),
    "incremental": ("examples/incremental.py", *FLIGHTS),
    "streaming_scoring": ("examples/streaming_scoring.py",),
    "images": ("examples/images.py",),
    "text_classification": ("examples/text_classification.py",),
    "text_generation": ("examples/text_generation.py",),
    "gpt": (*TRAIN, "conf/train/gpt.yaml", "--master", "local[4]", "--run_dir", "{folder}/runs"),
    "gpt-experts": (*TRAIN, "conf/train/gpt-experts.yaml", "--master", "local[4]", "--run_dir", "{folder}/runs"),
    "memory_limit": ("examples/memory_limit.py",),
    "linear_regression": ("examples/linear_regression.py",),
    "compare_aggregation": ("examples/compare_aggregation.py",),
    "compare_optimizers": ("examples/compare_optimizers.py",),
}
"""The arguments of Python for each example. Its runs are in a temporary folder."""
LINES = 9
"""Lines of output in a picture of an example that leaves no curve."""


def main() -> None:
    """Runs the examples whose names are given, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], default=[])
    for name in parser.parse_args().names or COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            first, *others = (argument.format(folder=folder) for argument in COMMANDS[name])
            is_command = first == "-m"
            place = ROOT if is_command else folder  # a YAML file names its model from the root of the repository
            first = first if is_command else str(ROOT / first)
            start = time.monotonic()
            done = subprocess.run([PYTHON, first, *others], cwd=place, capture_output=True, text=True, timeout=1800)
            seconds = time.monotonic() - start
            if done.returncode:
                sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            print(f"{name}: {seconds:.0f} s", flush=True)
            draw(name, Path(folder), done.stdout)


def draw(name: str, folder: Path, output: str) -> None:
    """Keeps the example's own picture, or draws the losses of its runs, or the last lines of its output."""
    path = ROOT / "docs" / "images" / "examples" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [each for each in sorted(folder.rglob("*.png")) if each.name != "loss.png"]
    own = [each.read_bytes() for each in files] or pictures_of_notebooks(folder)
    if own:
        path.write_bytes(own[-1])
        return
    curves = {run: losses for run in sorted(folder.rglob("metrics.jsonl")) if any(losses := read_losses(run))}
    figure = Figure(figsize=(4.8, 2.6), layout="constrained")
    if curves:
        axes = figure.subplots()
        for number, (run, (training, validation)) in enumerate(curves.items()):
            label = run.parent.name if len(curves) > 1 else "training"
            axes.plot(*zip(*training, strict=True), lw=1.2, color=f"C{number}", label=label)
            if validation:
                axes.plot(
                    *zip(*validation, strict=True),
                    "o--",
                    ms=3,
                    lw=0.8,
                    color=f"C{number + len(curves)}",
                    label="validation",
                )
        axes.set(xlabel="step", ylabel="loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    else:
        lines = [part for line in output.splitlines() for part in textwrap.wrap(line, 48)][-LINES:]
        figure.text(0.02, 0.5, "\n".join(lines), family="monospace", size=10, va="center")
    with mpl.rc_context({"savefig.dpi": 120}):
        figure.savefig(path)


def pictures_of_notebooks(folder: Path) -> list[bytes]:
    """The pictures that the cells of a notebook have drawn."""
    cells = [cell for path in folder.glob("*.ipynb") for cell in json.loads(path.read_text())["cells"]]
    found = [output.get("data", {}).get("image/png") for cell in cells for output in cell.get("outputs", ())]
    return [base64.b64decode(picture) for picture in found if picture]


def read_losses(path: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """The steps and losses of a run, of its steps and of its validations."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    training = [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]
    validation = [
        (line["step"], line["metrics"]["loss"]) for line in lines if line.get("metrics") and line["kind"] == "epoch"
    ]
    return training, validation


if __name__ == "__main__":
    main()

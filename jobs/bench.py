"""Measures spark_dl and its peers in one run, and prints one JSON object at the end."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks stand beside the package

from benchmarks import filters, scale, trials, validation
from benchmarks.exchange import compare, report
from benchmarks.exchange.answers import answers
from benchmarks.exchange.log import Log
from benchmarks.exchange.options import add_arguments, from_arguments, list_of
from benchmarks.faults import async_saves, chaos, job, recovery
from benchmarks.literature import literature
from benchmarks.parallel import parallel
from benchmarks.parallel import report as parallel_report
from benchmarks.peers import gpu, launch, loader, packing, predict, shards, step, text, track
from spark_dl import build_session, cli


def bench_launch(args: argparse.Namespace) -> dict[str, Any]:
    session = _session(args)
    master = session.conf.get("spark.master")
    result = launch.measure(session, num_ranks=args.ranks, repeats=args.repeats)
    session.stop()  # its slots are for the plain session
    plain_s = launch.measure_plain(master, num_ranks=args.ranks, repeats=args.repeats)
    return {**result, "plain_session_s": plain_s}


def bench_step(args: argparse.Namespace) -> dict[str, Any]:
    return step.measure(num_ranks=args.ranks, repeats=args.repeats)


def bench_track(args: argparse.Namespace) -> dict[str, Any]:
    return track.measure(_session(args), num_ranks=args.ranks, repeats=args.repeats, epochs=args.epochs)


def bench_predict(args: argparse.Namespace) -> dict[str, Any]:
    return predict.measure(_session(args), repeats=args.repeats, scale=args.scale)


def bench_text(args: argparse.Namespace) -> dict[str, Any]:
    return text.measure(_session(args), repeats=args.repeats, scale=args.scale)


def bench_packing(args: argparse.Namespace) -> dict[str, Any]:
    return packing.measure(_session(args), repeats=args.repeats, scale=args.scale)


def bench_validation(args: argparse.Namespace) -> dict[str, Any]:
    return validation.measure(_session(args), repeats=args.repeats, scale=args.scale)


def bench_loader(args: argparse.Namespace) -> dict[str, Any]:
    return loader.measure(_options(loader.Options, args))


def bench_shards(args: argparse.Namespace) -> dict[str, Any]:
    return shards.measure(
        _session(args), repeats=args.repeats, scale=args.scale, petastorm_python=args.petastorm_python
    )


def bench_gpu(args: argparse.Namespace) -> dict[str, Any]:
    return gpu.measure(_options(gpu.Options, args))


def bench_scale(args: argparse.Namespace) -> dict[str, Any]:
    return scale.measure(_options(scale.Options, args))


def bench_filters(args: argparse.Namespace) -> dict[str, Any]:
    return filters.measure(_options(filters.Options, args))


def bench_trials(args: argparse.Namespace) -> dict[str, Any]:
    options = _options(trials.Options, args)
    session = build_session("spark_dl bench", master=args.master or f"local[{options.groups * options.ranks}]")
    return trials.measure(session, options)


def bench_recovery(args: argparse.Namespace) -> dict[str, Any]:
    options = _options(recovery.Options, args)
    return {**recovery.measure(options), **async_saves.measure(options)}


def bench_chaos(args: argparse.Namespace) -> dict[str, Any]:
    return chaos.measure(_options(chaos.Options, args))


def bench_literature(args: argparse.Namespace) -> dict[str, Any]:
    return literature.measure(_options(literature.Options, args), _show)


def bench_parallel(args: argparse.Namespace) -> dict[str, Any]:
    report.check(args.report)
    options = parallel.Options(args.sections, args.rate_mbit, args.repeats, args.profiles)
    published: list[str] = []
    literature.measure(literature.Options(args.profiles), published.append)
    results = parallel.measure(options, Log(_show))
    parallel_report.write_report(
        results, args.report, exchange_report=args.exchange_report, literature=published
    )  # fmt: skip
    for line in parallel_report.answers(results):
        _show(line)
    return {"report": args.report, **parallel.summary(results), "left_out": results["left_out"]}


def bench_exchange(args: argparse.Namespace) -> dict[str, Any]:
    options = from_arguments(args)
    report.check(args.report)
    if args.master:
        if args.mtu or args.congestion_control:
            raise ValueError("--mtu, --congestion-control: cannot be set with --master; leave them out")
        if not args.folder:
            raise ValueError("--folder: expected a folder or URL that all hosts of --master can access, found nothing")
        session = build_session("spark_dl bench", master=args.master)
        results = compare.compare_on(session, args.folder, options, Log(_show))
    else:
        if args.folder:
            raise ValueError("--folder: only for an existing cluster; also set --master, or leave it out")
        results = compare.compare(options, Log(_show))
    report.write_report(results, args.report)
    _show(f"report: {args.report}")
    for line in answers(results):
        _show(line)
    parts = {"rows": "exchange", "crossings": "crossings", "left_out": "left_out"}
    return {"report": args.report, **{name: results.get(key, []) for name, key in parts.items()}}


def _session(args: argparse.Namespace) -> Any:
    return build_session("spark_dl bench", master=args.master or f"local[{args.ranks}]")


def _options(cls: Any, args: argparse.Namespace) -> Any:
    """Adds an argument for each field of a dataclass of options."""
    return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})


def _show(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)

    def add(
        name: str, text: str, run: Any, *, repeats: int | None = 7, is_repeated: bool = True
    ) -> argparse.ArgumentParser:
        command = what.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if is_repeated:
            command.add_argument(
                "--repeats", type=int, default=repeats, help="counted repetitions, of which the median is printed"
            )
        return command

    for define in (_on_spark, _on_a_gpu, _of_many_files, _of_trials, _of_faults, _between_hosts):
        define(add)
    return parser


def _on_spark(add: Any) -> None:
    of_launch = add(
        "launch", "a warm launch of two ranks: spark_dl.launch, also in a plain session, and TorchDistributor",
        bench_launch,
    )  # fmt: skip
    of_step = add(
        "step", "steps per second: the worker loop and a bare DDP loop under torchrun, in alternating pairs",
        bench_step, repeats=step.PAIRS,
    )  # fmt: skip
    of_track = add(
        "track", "steps per second of training with MLflow (a server on SQLite) and TensorBoard, and without, in "
        "alternating pairs", bench_track, repeats=track.PAIRS,
    )  # fmt: skip
    of_predict = add(
        "predict", "rows per second of scoring a CNN on Parquet: a model of spark_dl.ml, predict of a dataset, "
        "predict_batch_udf, and the limits of Spark and of the model", bench_predict,
    )  # fmt: skip
    of_text = add(
        "text", "rows per second of training and scoring a small BERT on rows of 5 to 256 tokens: spark_dl, the "
        "Trainer of transformers, pandas UDFs, predict_batch_udf, SentenceTransformer", bench_text, repeats=3,
    )  # fmt: skip
    of_packing = add(
        "packing", "true tokens per second, and loss, of training a small GPT-2 on texts of 20 to 200 tokens: spark_dl "
        "padded, sorted by length, and with packs; TRL padded, and with packs", bench_packing, repeats=3,
    )  # fmt: skip
    of_validation = add(
        "validation", "seconds that validations every 20 steps take from the training of a small CNN: with "
        "validate_every_steps, and with a Validator", bench_validation, repeats=3,
    )  # fmt: skip
    of_loader = add(
        "loader", "rows per second of a shuffled epoch: spark_dl, Petastorm, Mosaic, WebDataset, Ray Data, HF, "
        "tensors in memory, and the limits of memory and of Arrow",
        bench_loader,
    )  # fmt: skip
    of_shards = add(
        "shards", "seconds to write a cached DataFrame: spark_dl, df.write.parquet, Petastorm's converter", bench_shards
    )
    for command in (of_launch, of_step, of_track, of_predict, of_shards, of_text, of_packing, of_validation):
        command.add_argument("--ranks", type=int, default=2, help="ranks, or tasks (default: 2)")
    for command in (of_launch, of_track, of_predict, of_shards, of_text, of_packing, of_validation):
        command.add_argument("--master", help="Spark master URL (default: local[ranks])")
    for command in (of_loader, of_predict, of_shards, of_text, of_packing, of_validation):
        command.add_argument("--scale", type=float, default=1.0, help="size of the datasets (default: 1)")
    for command in (of_loader, of_shards):
        command.add_argument("--petastorm_python", default=".venv-petastorm/bin/python", help="of its environment")
    names = ", ".join(loader.PEERS)
    of_loader.add_argument("--peers", type=_words, default=loader.PEERS, help=f"comma-separated, of {names}")
    of_loader.add_argument(
        "--peers_python", default=loader.PEERS_PYTHON, help="Python of their environment (make setup-peers)"
    )
    of_track.add_argument(
        "--epochs", type=int, default=track.EPOCHS, help="epochs of 200 steps of each run (default: 5)"
    )


def _on_a_gpu(add: Any) -> None:
    usual = gpu.Options()
    of_gpu = add(
        "gpu", "rows per second on a GPU: a ResNet-50 with the loader, and with one batch that stays there; it, a GPT "
        "and a small network under the worker loop, and in bare scripts; ZeRO-3; scoring; NCCL with one rank; bf16",
        bench_gpu, repeats=usual.repeats,
    )  # fmt: skip
    of_gpu.add_argument(
        "--parts", type=_words, default=usual.parts, help=f"comma-separated, of {', '.join(gpu.PARTS)} (default: all)"
    )
    of_gpu.add_argument("--device", choices=("cuda", "cpu"), default=usual.device)
    of_gpu.add_argument("--batch-size", type=int, default=usual.batch_size, help="a multiple of 16 (default: 256)")
    of_gpu.add_argument("--steps", type=int, default=usual.steps, help="steps of each loop in each turn (default: 100)")
    of_gpu.add_argument(
        "--image-size", type=int, default=usual.image_size, help="height and width in pixels (default: 224)"
    )
    of_gpu.add_argument("--gpt-rows", type=int, default=usual.gpt_rows, help="texts of a batch of the GPT (32)")
    of_gpu.add_argument("--gpt-blocks", type=int, default=usual.gpt_blocks, help="(default: 12)")
    of_gpu.add_argument("--gpt-width", type=int, default=usual.gpt_width, help="a multiple of 64 (default: 768)")
    of_gpu.add_argument("--mlp-rows", type=int, default=usual.mlp_rows, help="of a batch of the small network (4096)")
    of_gpu.add_argument("--mlp-steps", type=int, default=usual.mlp_steps, help="of the small network (1000)")
    of_gpu.add_argument("--peak-tflops", type=float, help="dense bf16 TFLOP/s of the device, for the MFU of the GPT")
    of_gpu.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")


def _of_many_files(add: Any) -> None:
    of_scale = add(
        "scale", "a manifest of many files: seconds to open it, MiB sent to a rank, and a rank's plan of an epoch",
        bench_scale, repeats=scale.Options().repeats,
    )  # fmt: skip
    of_scale.add_argument("--files", type=int, default=scale.Options().files, help="(default: 100000)")
    of_scale.add_argument(
        "--row-groups", type=int, default=scale.Options().row_groups, help="row groups of each file (25)"
    )
    of_filters = add(
        "filters", "seconds and MiB that data.filters reads with Parquet's page index and without", bench_filters,
        repeats=filters.Options().repeats,
    )  # fmt: skip
    of_filters.add_argument("--rows", type=int, default=filters.Options().rows, help="rows of each file (400000)")
    of_filters.add_argument("--floats", type=int, default=filters.Options().floats, help="elements of a row (64)")
    of_filters.add_argument("--shares", type=list_of(float), default=filters.Options().shares, help="(0.01,0.1)")


def _of_trials(add: Any) -> None:
    of_trials = add(
        "trials", "seconds of trials on groups of ranks in one job, and as one job after another; with ranks that "
        "compute, and with ranks that sleep", bench_trials, repeats=trials.Options().repeats,
    )  # fmt: skip
    default = trials.Options()
    of_trials.add_argument("--trials", type=int, default=default.trials, help="(default: 8)")
    of_trials.add_argument("--groups", type=int, default=default.groups, help="trials at the same time (default: 2)")
    of_trials.add_argument("--ranks", type=int, default=default.ranks, help="ranks of each trial (default: 1)")
    of_trials.add_argument("--epochs", type=int, default=default.epochs, help="epochs of each trial (default: 5)")
    of_trials.add_argument(
        "--sleep_s", type=float, default=default.sleep_s, help="seconds of a step that sleeps (0.02)"
    )
    of_trials.add_argument("--master", help="local Spark master URL (default: local[groups * ranks])")


def _of_faults(add: Any) -> None:
    of_recovery = add(
        "recovery", "seconds from SIGKILL of a rank until the driver has noticed it, and until training goes on; steps "
        "per second with a checkpoint in every tenth step, synchronous and asynchronous, to those without",
        bench_recovery, repeats=recovery.Options().repeats,
    )  # fmt: skip
    of_recovery.add_argument("--steps", type=int, default=recovery.Options().steps, help="of a measurement (50)")
    of_recovery.add_argument("--width", type=int, default=recovery.Options().width, help="of the model's layers (1536)")
    text = "random faults of ranks, executors and hosts (as root), and what a run ends with beside one without faults"
    of_chaos = add("chaos", text, bench_chaos, is_repeated=False)
    of_chaos.add_argument("--seeds", type=int, default=chaos.Options().seeds, help="number of seeds (default: 20)")
    of_chaos.add_argument("--first-seed", type=int, default=0, help="to repeat the run of a seed (default: 0)")
    of_chaos.add_argument(
        "--strategies", type=_words, default=chaos.Options().strategies,
        help=f"comma-separated, of {', '.join(job.STRATEGIES)} (default: all)",
    )  # fmt: skip
    of_chaos.add_argument("--out", help="JSON file to write, with a row for each run")


def _between_hosts(add: Any) -> None:
    of_exchange = add(
        "exchange",
        "one exchange of gradients by ring, Spark's aggregation, parameter servers: seconds, bytes, overlap, scaling, "
        "stragglers; on virtual hosts on this machine (as root), or on an existing cluster",
        bench_exchange, repeats=None,
    )  # fmt: skip
    add_arguments(of_exchange)
    of_exchange.add_argument("--report", default="runs/exchange/report.html", help="HTML page to write")
    of_exchange.add_argument("--master", help="URL of an existing cluster, with one task slot on each host")
    of_exchange.add_argument("--folder", help="with --master: a folder or URL that all its hosts can access")
    of_parallel = add(
        "parallel",
        "models that are cut or sharded, on 4 virtual hosts of this machine (as root): bytes held and sent, bubbles "
        "and throughput of pipelines, PipeDream beside GPipe, the planner's choice among all plans, and VGG-16",
        bench_parallel, repeats=parallel.Options().repeats,
    )  # fmt: skip
    of_parallel.add_argument(
        "--sections", type=_words, default=parallel.SECTIONS,
        help=f"comma-separated, of {', '.join(parallel.SECTIONS)} (default: all)",
    )  # fmt: skip
    of_parallel.add_argument(
        "--rate-mbit", type=float, default=parallel.Options().rate_mbit,
        help="rate of each link in each direction, in the section `plans` (default: 200)",
    )  # fmt: skip
    of_parallel.add_argument("--report", default="runs/parallel/report.html", help="HTML page to write")
    of_parallel.add_argument(
        "--exchange-report", default="runs/exchange/report.html", help="page to link to, if it is there"
    )
    text = "published figures of ZeRO, GPipe, PipeDream and BERT-Large beside those of the planner's formulas"
    of_literature = add("literature", text, bench_literature, is_repeated=False)
    for command in (of_parallel, of_literature):
        command.add_argument(
            "--profiles", default=literature.PROFILES,
            help="folder with PipeDream's profiles: profiler/image_classification/profiles of a clone of "
            f"github.com/msr-fiddle/pipedream, or vgg16.txt and resnet50.txt (default: {literature.PROFILES})",
        )  # fmt: skip


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    cli.run(lambda: arguments.run(arguments))

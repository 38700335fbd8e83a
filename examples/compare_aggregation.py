"""One model, dataset and seed, trained by a ring in barrier tasks, by Spark's own aggregation and by parameter servers.

Writes a page with the curves and prints a table. The digits are those of scikit-learn.

.venv/bin/python examples/compare_aggregation.py
.venv/bin/python examples/compare_aggregation.py --straggler-s 0.1 --methods "ddp,tree_reduce,parameter_server async"
.venv/bin/python examples/compare_aggregation.py --master spark://host:7077 --folder hdfs:///tmp/compare

What the links of a network make of it, `jobs/bench.py exchange` measures.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks stand beside the package

import spark_dl
from benchmarks.exchange import compare, error_runtime, report
from benchmarks.exchange.log import Log


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", help="Spark master URL (default: local[ranks])")
    parser.add_argument("--ranks", type=int, default=4, help="task slots that are used (default: 4)")
    parser.add_argument("--methods", help="names, with commas between (default: all)")
    parser.add_argument("--straggler-s", type=float, default=0.0, help="mean delay of every gradient, in seconds")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", help="folder or URL that all hosts reach (default: a temporary folder)")
    parser.add_argument("--report", default="runs/compare_aggregation/report.html", help="page that is written")
    args = parser.parse_args()
    known = list(error_runtime.strategies(args.ranks))
    args.methods = args.methods.split(",") if args.methods else known
    if unknown := [m for m in args.methods if m not in known]:
        parser.error(f"--methods: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    if args.master and not args.master.startswith("local") and not args.folder:
        parser.error("--folder: name a folder or URL that all hosts of --master reach")
    return args


def main() -> None:
    args = parse()
    report.check(args.report)
    log = Log(lambda line: print(line, file=sys.stderr))
    spark = spark_dl.build_session("compare_aggregation", master=args.master or f"local[{args.ranks}]")
    with tempfile.TemporaryDirectory() as here, compare.own_folder(args.folder or here) as folder:
        rows = error_runtime.measure(
            spark, folder, num_hosts=args.ranks, straggler_s=args.straggler_s, methods=args.methods,
            epochs=args.epochs, log=log,
        )  # fmt: skip
    print(f"{'method':32} {'exact':>5} {'seconds':>8} {'loss':>8} {'accuracy':>8} {'staleness':>9}")
    for row in rows:
        staleness = f"{row['staleness']['mean']:.2f}" if row["staleness"] else ""
        exact = "yes" if row["exact"] else "no"
        numbers = f"{row['seconds']:8.1f} {row['loss']:8.4f} {row['accuracy']:8.1%}"
        print(f"{row['method']:32} {exact:>5} {numbers} {staleness:>9}")
    about = {"network": f"{args.ranks} ranks of {spark.conf.get('spark.master')}", "straggler_s": args.straggler_s}
    report.write_report({"about": about, "stragglers": rows, "left_out": log.left_out}, args.report)
    print(f"report: {args.report}")
    spark.stop()


if __name__ == "__main__":
    main()

"""Creates a testbed by hand, as root:

python -m benchmarks.testbed --hosts 4 --rate-mbit 200 --spark     # shows how to enter; removed after Ctrl-C
python -m benchmarks.testbed --reap                                # removes leftovers of dead processes
"""

from __future__ import annotations

import argparse
import contextlib
import signal

from benchmarks.testbed import reap, standalone, testbed


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="hosts besides the driver's (default: 4)")
    parser.add_argument("--rate-mbit", type=float, help="rate of each link in either direction; by default no limit")
    parser.add_argument("--spark", action="store_true", help="start a Spark master and a worker on each host")
    parser.add_argument("--reap", action="store_true", help="remove leftovers of dead processes, and nothing else")
    args = parser.parse_args()
    if args.reap:
        for bed in reap.leftovers():
            reap.remove(bed)
            print(f"removed {bed}")
        return
    if reason := testbed.unavailable():
        parser.error(reason)
    with testbed.hosts(args.hosts, rate_mbit=args.rate_mbit) as made, contextlib.suppress(KeyboardInterrupt):
        if args.spark:
            print(f"Spark master (run the driver on the host `driver`): {standalone.start_spark(made)}")
        for host in (made.driver, *made.hosts):
            print(f"{host.name}  {host.address}  ip netns exec {host.namespace} bash")
        print("press Ctrl-C to remove the testbed", flush=True)
        signal.pause()


if __name__ == "__main__":
    _main()

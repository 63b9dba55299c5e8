"""Measures the operations: `python -m pallas_kernels.bench` prints one JSON object a line."""

import argparse
import json

from pallas_kernels.bench.operations import OPERATIONS, Sizes, measure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 8192])
    parser.add_argument("--top-k", type=int, default=6, help="experts of a token")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=2688, help="of a token; the sum of a product")
    parser.add_argument("--inner", type=int, default=1856, help="columns of a product")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-bytes", type=int, default=3 << 30, help="size of the memory whose reading is timed")
    args = parser.parse_args()
    for operation in args.operations:
        for tokens in args.tokens:
            sizes = Sizes(tokens=tokens, top_k=args.top_k, experts=args.experts, width=args.width, inner=args.inner)
            for row in measure(operation, sizes, rounds=args.rounds, read_bytes=args.read_bytes):
                print(json.dumps(row), flush=True)


main()

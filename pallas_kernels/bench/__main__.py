"""The benchmarks' command line."""

import argparse
import json

from pallas_kernels.bench import grouped_matmul


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    grouped_matmul.add_arguments(parser.add_subparsers(dest="operation", required=True))
    for row in grouped_matmul.run(parser.parse_args()):
        print(json.dumps(row), flush=True)


main()

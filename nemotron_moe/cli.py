"""The command line: reads the arguments, calls the library, and turns errors into one line."""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import nemotron_moe as nm
from nemotron_moe.description import not_found, preset
from nemotron_moe.hf_config import MoELayers, moe_layers_from_hf, pick_layer

EXIT_OK, EXIT_FAILED, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141

_EPILOG = """\
examples:
  nemotron-moe demo                                  is this installation right?
  nemotron-moe info                                  the released models
  nemotron-moe info super                            what one of them holds and costs
  nemotron-moe info ~/Nemotron-3-Nano                the same for a checkpoint
  nemotron-moe info ~/Nemotron-3-Nano --layer 3      one layer of it
  nemotron-moe info ~/Nemotron-3-Nano --layer 3 --files
                                                     the shards that this layer needs
  nemotron-moe check ~/Nemotron-3-Nano --layer 3     load that layer, run it, prove it right
  nemotron-moe check ~/Nemotron-3-Super-NVFP4 --layer 3 --report layer3.json --sibling ~/Nemotron-3-Super-BF16
                                                     the same, and what quantisation cost
  nemotron-moe bench --models nano --tokens 512      how fast is it on this GPU, beside others and beside the chip

exit status: 0 all is well, 1 the demo, the check or the benchmark did not pass, 2 an error, told in one line.
"""
_INFO = """\
Without an argument it lists the released models. With one it says what the MoE layers hold and cost, from the
configuration alone: nothing is loaded, and no weights need be there.
"""
_CHECK = """\
Loads one layer, runs it jit-compiled on random tokens, and compares every stage with the same layer in float64 NumPy,
which takes seconds to minutes for a layer of a real model. Only the shards that hold the layer need be present.
"""
_BENCH = """\
Device time of the layer's parts on an NVIDIA GPU (elsewhere the time that passes), beside the floor that the chip's
memory and dense products set, and beside torch, Hugging Face and XLA where they are there; all results are checked.
Random weights and tokens. It takes some 6 minutes on an H200; every choice below makes it shorter or longer.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"nemotron-moe: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status; `arguments` are those of the process if None."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # Also what --help wrote before it exits.
    except BrokenPipeError:
        # Whoever read our output or our message has seen enough; Python would complain again when it flushes at exit.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return EXIT_BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    logging.getLogger("jax._src.xla_bridge").addFilter(_without_traceback)
    try:
        return options.run(options)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return _error("interrupted.", EXIT_INTERRUPTED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _error(f"{where}{error.strerror or error}")
    except MemoryError as error:
        return _error(f"not enough memory: {error}".removesuffix(": "))
    except (ValueError, RuntimeError) as error:  # RuntimeError is what jax raises about devices and their memory.
        return _error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nemotron-moe",
        description="The Mixture-of-Experts layer of NVIDIA Nemotron-3 in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    demo = commands.add_parser(
        "demo", parents=[common], help="run a layer of a tiny checkpoint and compare with Hugging Face's output"
    )
    demo.set_defaults(run=_demo)

    info = commands.add_parser("info", parents=[common], help="what a model's MoE layers hold", description=_INFO)
    info.add_argument("model", nargs="?", help="a checkpoint's folder, a config.json, or the name of a released model")
    info.add_argument("--layer", type=_layer, metavar="N", help="one layer: a number, or a name such as mtp.layers.1")
    info.add_argument("--files", action="store_true", help="print the shards that hold --layer, one a line")
    info.set_defaults(run=_info)

    check = commands.add_parser(
        "check", parents=[common], help="load a layer, run it, and compare with the float64 oracle", description=_CHECK
    )
    check.add_argument("path", help="a checkpoint's folder")
    check.add_argument(
        "--layer", type=_layer, metavar="N", required=True, help="a number, or a name such as mtp.layers.1"
    )
    check.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the activations (default: float32)",
    )
    check.add_argument(
        "--report", metavar="FILE", help="write to it how each weight is stored, and how exact each way of computing is"
    )
    check.add_argument(
        "--sibling", metavar="PATH", help="the same model unquantised: the report has each weight's error against it"
    )
    check.set_defaults(run=_check)
    _add_bench(commands, common)
    return parser


def _add_bench(commands: Any, common: argparse.ArgumentParser) -> None:
    bench = commands.add_parser(
        "bench", parents=[common], help="time the layer's parts on a GPU, beside rivals", description=_BENCH
    )
    some: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    bench.add_argument("--models", **some, default=["nano", "super"], help="of nano super ultra (default: nano super)")
    bench.add_argument("--tokens", nargs="+", type=int, metavar="T", help="in this order (default: 8192 512 2048 128)")
    bench.add_argument("--parts", **some, help="of up down plan routed block (default: all)")
    bench.add_argument("--routings", **some, help="of uniform zipf one (default: uniform)")
    bench.add_argument("--passes", **some, help="of cool hot (default: both)")
    bench.add_argument(
        "--implementations",
        **some,
        help="of auto torch_grouped_mm huggingface tokamax xla; auto is what the layer picks (default: all, xla and "
        "huggingface with 8192 tokens only)",
    )
    bench.add_argument("--rounds", type=int, metavar="N", help="of each hot pass (default: 2)")
    bench.add_argument(
        "--lock", metavar="FILE", help="runs with the same FILE compile together and measure one after the other"
    )
    bench.add_argument("--output", metavar="FILE", help="append the results to it, one JSON object a line")
    bench.add_argument("--commit", metavar="TEXT", help="the source's, where git cannot tell")
    bench.set_defaults(run=_bench)


def _demo(options: argparse.Namespace) -> int:
    from nemotron_moe import cli_output as output
    from nemotron_moe.demo import run_demo

    report = run_demo()
    output.show(output.demo_report(report), as_json=options.json)
    return EXIT_OK if report.passed else EXIT_FAILED


def _info(options: argparse.Namespace) -> int:
    from nemotron_moe import cli_output as output

    if options.files:
        if options.model is None or options.layer is None:
            raise ValueError("--files wants a checkpoint and a layer: nemotron-moe info PATH --layer N --files.")
        _refuse_early(options.model, options.layer)
        shown = output.files(nm.layer_files(options.model, options.layer))
    elif options.model is None:
        if options.layer is not None:
            raise ValueError("--layer wants a model: nemotron-moe info MODEL --layer N.")
        shown = output.models(nm.presets.MODELS)
    else:
        layers = _moe_layers(options.model)
        if options.layer is None:
            shown = output.description(nm.describe(layers))
        else:
            shown = output.layer(options.layer, _pick(layers, options.layer))
    output.show(shown, as_json=options.json)
    return EXIT_OK


def _check(options: argparse.Namespace) -> int:
    from nemotron_moe import cli_output as output

    if options.sibling and not options.report:
        raise ValueError("--sibling wants --report FILE, where the errors are written.")
    config = _refuse_early(options.path, options.layer)
    if options.report:
        from nemotron_moe.layer_report import check_arguments, check_sizes, write_report

        check_arguments(options.report, options.layer, options.sibling)
        if options.sibling and config and (other := _refuse_early(options.sibling, options.layer)):
            check_sizes(options.sibling, options.layer, other, config)
    weights, config = nm.load_layer(options.path, options.layer)
    if options.report:
        write_report(options.report, options.path, options.layer, weights, config, sibling=options.sibling)
    stored = nm.layer_formats(options.path, options.layer)
    report = nm.self_check(weights, config, dtype=options.dtype)
    output.show(
        output.check_report(options.path, options.layer, options.dtype, config, weights, stored, report),
        as_json=options.json,
    )
    return EXIT_OK if report.passed else EXIT_FAILED


def _bench(options: argparse.Namespace) -> int:
    # torch needs some of the memory. This is read when jax's backend starts, and changes no result.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from nemotron_moe import bench
    from nemotron_moe import cli_output as output

    known = {"nano": nm.presets.NANO, "super": nm.presets.SUPER, "ultra": nm.presets.ULTRA}
    if unknown := sorted(set(options.models) - set(known)):
        raise ValueError(f"models has {unknown}; wanted some of {list(known)}.")
    names = ("tokens", "parts", "routings", "passes", "implementations", "rounds", "lock", "commit")
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    models = {name: known[name] for name in options.models}
    chosen = bench.Options(models=models, say=lambda line: print(line, file=sys.stderr, flush=True), **asked)
    rows = []
    with open(options.output or os.devnull, "a") as file:
        for row in bench.run(chosen):
            print(json.dumps(row, allow_nan=False), file=file, flush=True)
            rows.append(row)
    passed = bench.passed(rows)
    output.show(output.bench_report(rows, passed), as_json=options.json)
    return EXIT_OK if passed else EXIT_FAILED


def _moe_layers(model: str) -> MoELayers:
    from checkpoints.directory import resolve

    if layers := preset(model):
        return layers
    if os.path.isfile(model):
        return moe_layers_from_hf(model)
    if "/" not in model and not os.path.exists(os.path.expanduser(model)):
        raise ValueError(not_found(model))
    folder = resolve(model)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder.absolute()} is no checkpoint: it has no config.json.")
    return moe_layers_from_hf(folder)


def _pick(layers: MoELayers, layer: int | str) -> nm.MoEConfig:
    try:
        return pick_layer(layers, layer)
    except ValueError as error:
        mtp = [name for name in layers if isinstance(name, str)]
        if mtp and str(layer).lower().startswith("mtp"):
            raise ValueError(f"{error} Did you mean {' or '.join(mtp)}?") from error
        raise


def _refuse_early(path: str, layer: int | str) -> nm.MoEConfig | None:
    """Says what is wrong with a layer in the same words as `info`, where there is a config.json to tell."""
    from checkpoints.directory import resolve

    if not os.path.exists(path) and preset(path):
        raise ValueError(f"{path} is a preset, which has no weights; pass the folder of a downloaded checkpoint.")
    folder = resolve(path, layer)
    return _pick(moe_layers_from_hf(folder), layer) if (folder / "config.json").exists() else None


def _layer(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _without_traceback(record: logging.LogRecord) -> bool:
    # A GPU plugin that finds no driver or no cuDNN is worth a line, and jax goes on without it.
    if record.exc_info:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {record.exc_info[1]}", (), None
    return True


def _version() -> str:
    try:
        own = importlib.metadata.version("nemotron-moe")
    except importlib.metadata.PackageNotFoundError:
        own = "(source tree)"
    return f"nemotron-moe {own}, jax {importlib.metadata.version('jax')}"


def _error(message: str, status: int = EXIT_ERROR) -> int:
    print(f"nemotron-moe: {' '.join(message.split())}", file=sys.stderr)
    return status

"""The Mixture-of-Experts layer of NVIDIA Nemotron-3 in JAX.

    import nemotron_moe as nm

    weights, config = nm.load_layer("path/to/checkpoint", 3)
    out = jax.jit(nm.moe_block, static_argnames="config")(h, weights, config=config)

Names are loaded on first use, so that importing the package is quick and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `_HOME` says, for type checkers and editors
    from checkpoints import CheckpointError as CheckpointError
    from checkpoints import FieldFormat as FieldFormat
    from checkpoints import layer_files as layer_files
    from checkpoints import layer_formats as layer_formats
    from checkpoints import list_moe_layers as list_moe_layers
    from checkpoints import load_layer as load_layer
    from checkpoints import load_layers as load_layers
    from nemotron_moe import presets as presets
    from nemotron_moe import reference as reference
    from nemotron_moe.accuracy_by_stage import accuracy as accuracy
    from nemotron_moe.bucketing import bucket_size as bucket_size
    from nemotron_moe.bucketing import pad_to_bucket as pad_to_bucket
    from nemotron_moe.check import CheckReport as CheckReport
    from nemotron_moe.check import self_check as self_check
    from nemotron_moe.config import MoEConfig as MoEConfig
    from nemotron_moe.conversion import prepare as prepare
    from nemotron_moe.conversion import quantize_weights as quantize_weights
    from nemotron_moe.dense import linear as linear
    from nemotron_moe.dense import rms_norm as rms_norm
    from nemotron_moe.dense import shared_expert as shared_expert
    from nemotron_moe.description import describe as describe
    from nemotron_moe.dispatch import Plan as Plan
    from nemotron_moe.dispatch import combine as combine
    from nemotron_moe.dispatch import gather_rows as gather_rows
    from nemotron_moe.dispatch import make_plan as make_plan
    from nemotron_moe.experts import routed_experts as routed_experts
    from nemotron_moe.explanation import explain as explain
    from nemotron_moe.layer import Aux as Aux
    from nemotron_moe.layer import moe_block as moe_block
    from nemotron_moe.layer import moe_mixer as moe_mixer
    from nemotron_moe.routing import Routing as Routing
    from nemotron_moe.routing import route as route
    from nemotron_moe.sharding import ShardingRules as ShardingRules
    from nemotron_moe.stats import RoutingStats as RoutingStats
    from nemotron_moe.stats import routing_stats as routing_stats
    from nemotron_moe.weights import MoEWeights as MoEWeights
    from nemotron_moe.weights import abstract_weights as abstract_weights
    from nemotron_moe.weights import init_weights as init_weights
    from pallas_kernels.formats import Fp8Array as Fp8Array
    from pallas_kernels.formats import Nvfp4Array as Nvfp4Array
    from pallas_kernels.formats import QuantisationError as QuantisationError
    from pallas_kernels.formats import quantisation_error as quantisation_error
    from pallas_kernels.formats import quantize as quantize

_HOME = {
    "checkpoints": (
        "CheckpointError",
        "FieldFormat",
        "layer_files",
        "layer_formats",
        "list_moe_layers",
        "load_layer",
        "load_layers",
    ),
    "nemotron_moe.accuracy_by_stage": ("accuracy",),
    "nemotron_moe.bucketing": ("bucket_size", "pad_to_bucket"),
    "nemotron_moe.check": ("CheckReport", "self_check"),
    "nemotron_moe.config": ("MoEConfig",),
    "nemotron_moe.conversion": ("prepare", "quantize_weights"),
    "nemotron_moe.dense": ("linear", "rms_norm", "shared_expert"),
    "nemotron_moe.description": ("describe",),
    "nemotron_moe.dispatch": ("Plan", "combine", "gather_rows", "make_plan"),
    "nemotron_moe.experts": ("routed_experts",),
    "nemotron_moe.explanation": ("explain",),
    "nemotron_moe.layer": ("Aux", "moe_block", "moe_mixer"),
    "nemotron_moe.routing": ("Routing", "route"),
    "nemotron_moe.sharding": ("ShardingRules",),
    "nemotron_moe.stats": ("RoutingStats", "routing_stats"),
    "nemotron_moe.weights": ("MoEWeights", "abstract_weights", "init_weights"),
    "pallas_kernels.formats": ("Fp8Array", "Nvfp4Array", "QuantisationError", "quantisation_error", "quantize"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = ("presets", "reference")

__all__ = sorted([*_MODULE_OF, *_SUBMODULES])


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"nemotron_moe.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nemotron_moe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

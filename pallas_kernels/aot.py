"""Compiling for an NVIDIA H200 on a machine that has none: XLA's whole pipeline and ptxas, no GPU and no driver."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from pallas_kernels.implementation import H200 as TARGET
from pallas_kernels.implementation import compiling_for

# What XLA asks a GPU about, as an H200 answers (a text proto of stream_executor.GpuTargetConfigProto).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150000000000  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""

# Modules of the `aot` dependency group.
PACKAGES = {
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    "jax_cuda13_plugin": "jax-cuda13-plugin",
    "nvidia.cu13": "nvidia-cuda-nvcc and nvidia-nvvm",
}


def compile_for_h200(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Compiled:
    """Compiles `fun` for one H200, choosing implementations as there; nothing can be run, but inspected.

    The result has `memory_analysis()` and `as_text()`.

    Args:
      fun: a function, jitted or not.
      *args, **kwargs: pytrees of arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.

    Raises:
      ModuleNotFoundError: without the packages of the `aot` group; says what to type.
    """
    sharding = SingleDeviceSharding(_topology().devices[0])
    args, kwargs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (args, kwargs))
    jitted: Any = fun if hasattr(fun, "trace") else jax.jit(fun)
    with compiling_for(TARGET):
        return jitted.trace(*args, **kwargs).lower().compile()


@functools.cache
def _topology() -> Any:
    if missing := [package for module, package in PACKAGES.items() if not _found(module)]:
        raise ModuleNotFoundError(
            f"Compiling for a GPU without one needs {', '.join(missing)}. In a checkout of this project type: "
            "uv sync --group dev --group aot"
        )
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H200, topology="1x1x1")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module's parent is missing
        return False

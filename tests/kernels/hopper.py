"""Tests of Hopper kernels: natively on a Hopper GPU, and on any other machine in Pallas's interpreter."""

import contextlib
import dataclasses
import warnings
from unittest import mock

import jax
import pytest
from jax._src import dispatch
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.implementation import H200, compiling_for, default_device

# Every one is interpreted, by a thread for each warpgroup; two are enough for them to take turns and to race.
FEW_CORES = dataclasses.replace(H200, cores=2)


def has_hopper():
    """Whether jax computes on a Hopper GPU here."""
    return getattr(default_device(), "compute_capability", None) == H200.compute_capability


@contextlib.contextmanager
def hopper():
    """Inside, choices are made as on an H200 and its kernels run, and they may have no race.

    On a Hopper GPU this does nothing. Elsewhere the kernels run in the interpreter, in memory that is NaN (integers:
    the largest) until it is written, and each is watched for races: on leaving the block, one is an AssertionError.
    """
    if has_hopper():
        yield
        return
    watched = []

    def watch(*args, **kwargs):
        watched.append(watch.original(*args, **kwargs))
        return watched[-1]

    watch.original = gpu_callbacks.GPURaceDetectionState
    # Copies take these clocks in turn, and two with the same one pass for ordered: the default five would hide races.
    interpreter = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", num_tma_threads_per_device=61)
    try:
        # Every kernel has a record of its own, and the interpreter keeps the last one only.
        with (
            mock.patch.object(gpu_callbacks, "GPURaceDetectionState", watch),
            compiling_for(FEW_CORES),
            warnings.catch_warnings(),
            plgpu.force_gpu_interpret_mode(interpreter),
        ):
            # Of NumPy, in whatever multiplies memory that is NaN by intent.
            warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
            yield
            jax.effects_barrier()
        races = [number for number, record in enumerate(watched) if record.races_found]
        assert not races, f"Of the kernels that ran, those with the numbers {races} had a race; see the output."
    finally:
        # After an exception the interpreter would wait for the kernel that failed, or jax raise its error again.
        gpu_callbacks.reset_gpu_interpret_mode_state()
        dispatch.runtime_tokens.clear()


class OnHopper:
    """Puts every test of a class that inherits it inside `hopper()`."""

    @pytest.fixture(autouse=True)
    def hopper(self):
        with hopper():
            yield

"""What users could run instead of our layer, as entries of the benchmark."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nemotron_moe import bench_check as check
from nemotron_moe.bench_cell import Cell, Entry
from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights
from pallas_kernels.bench.device import Call
from pallas_kernels.bench.rivals import (
    NotPresentError,
    TorchExperts,
    TorchRouting,
    find,
    find_torch,
    to_jax,
    to_torch,
    tokamax_product,
)

# What each can run.
PARTS: dict[str, tuple[str, ...]] = {
    "torch_grouped_mm": ("up", "down", "routed"),
    "huggingface": ("block",),
    "tokamax": ("up", "down"),
}

_MODELING = "transformers.models.nemotron_h.modeling_nemotron_h"
_MODULES = {"torch_grouped_mm": ("torch",), "huggingface": ("torch", "transformers", _MODELING)}


def load(names: Collection[str]) -> None:
    """Imports what these rivals need, if it is here: it takes seconds, before it is this run's turn to measure."""
    for module in dict.fromkeys(module for name in names for module in _MODULES.get(name, ())):
        with contextlib.suppress(NotPresentError):
            find(module)


def rival(name: str, part: str, cell: Cell) -> Entry:
    """A rival's implementation of a part, on the same data.

    Raises:
      NotPresentError: if it is not here.
    """
    return {"torch_grouped_mm": _torch, "huggingface": _hugging_face, "tokamax": _tokamax}[name](part, cell)


def _torch(part: str, cell: Cell) -> Entry:
    experts = TorchExperts(cell.weights.experts_up_proj, cell.weights.experts_down_proj)
    torch, count = experts.torch, cell.config.n_routed_experts
    routings = [TorchRouting.of(torch, ids, count) for ids in cell.ids]
    rows = routings[0].slot_of_row.shape[0]
    if part == "routed":
        each = zip(cell.x, cell.slots, routings, strict=True)
        arguments = [(to_torch(torch, x), to_torch(torch, slots), routing) for x, slots, routing in each]
        calls = [_without_gradient(torch, experts.routed, *one) for one in arguments]
    else:
        product, lhs = getattr(experts, part), to_torch(torch, cell.rows(part, rows))
        calls = [_without_gradient(torch, product, lhs, routing.offsets) for routing in routings]
    widest = max(cell.config.expert_width, cell.config.moe_intermediate_size)
    sizes = [2 * rows * widest, 2 * rows * widest, 2 * cell.tokens * cell.config.expert_width]
    return _torch_entry(part, "torch_grouped_mm", torch, calls, sizes, cell)


def _hugging_face(part: str, cell: Cell) -> Entry:
    torch, block = hugging_face_block(cell.config, cell.block_weights)
    calls = [_without_gradient(torch, block, to_torch(torch, h)) for h in cell.h]
    sizes = [2 * cell.tokens * cell.config.hidden_size] * 2
    return _torch_entry(part, "huggingface", torch, calls, sizes, cell)


def hugging_face_block(config: MoEConfig, weights: MoEWeights) -> tuple[Any, Callable[[Any], Any]]:
    """torch, and transformers' Nemotron-H block h [T, H] -> [T, H] with `grouped_mm` experts, on the same weights.

    Raises:
      NotPresentError: if torch or transformers, or the latter's Nemotron-H, is not here.
    """
    torch, transformers = find_torch(), find("transformers")
    modeling = find(_MODELING)
    theirs = transformers.NemotronHConfig(
        layers_block_type=["moe"],
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_latent_size=config.moe_latent_size,
        n_routed_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        routed_scaling_factor=config.routed_scaling_factor,
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        layer_norm_epsilon=config.layer_norm_epsilon,
        mlp_hidden_act="relu2",
    )
    theirs._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = modeling.NemotronHBlock(theirs, 0)
    state = {_THEIR_NAMES[name]: to_torch(torch, leaf) for name, leaf in weights.items().items()}
    block.load_state_dict(state, assign=True)
    block = block.eval().requires_grad_(False)
    return torch, lambda h: block(h[None])[0]


_THEIR_NAMES = {
    "norm": "norm.weight",
    "gate": "mixer.gate.weight",
    "gate_bias": "mixer.gate.e_score_correction_bias",
    "fc1_latent_proj": "mixer.fc1_latent_proj.weight",
    "fc2_latent_proj": "mixer.fc2_latent_proj.weight",
    "experts_up_proj": "mixer.experts.up_proj",
    "experts_down_proj": "mixer.experts.down_proj",
    "shared_experts_up_proj": "mixer.shared_experts.up_proj.weight",
    "shared_experts_down_proj": "mixer.shared_experts.down_proj.weight",
}


def _torch_entry(part: str, name: str, torch: Any, calls: Sequence[Call], sizes: Sequence[int], cell: Cell) -> Entry:
    judge = cell.judge(part, cell.tokens * cell.config.num_experts_per_tok)

    def run_check() -> tuple[float, bool]:
        # torch has an allocator of its own, which reuses what was freed last.
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        full = [torch.full((size // 2,), torch.nan, dtype=torch.bfloat16, device=device) for size in sizes]
        del full
        return judge(to_jax(calls[0]()))

    return Entry(part, name, list(calls), run_check)


def _without_gradient(torch: Any, function: Callable, *arguments: Any) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return function(*arguments)

    return call


def _tokamax(part: str, cell: Cell) -> Entry:
    rhs = cell.weights.experts_up_proj if part == "up" else cell.weights.experts_down_proj
    product = tokamax_product(rhs, "relu2" if part == "up" else None)
    rows = cell.tokens * cell.config.num_experts_per_tok
    lhs = cell.rows(part, rows)
    calls: list[Call] = [lambda sizes=sizes: product(lhs, sizes) for sizes in cell.sizes]  # type: ignore[misc]
    judge = cell.judge(part, rows)

    def run_check() -> tuple[float, bool]:
        check.dirty([2 * rows * rhs.shape[1]])
        return judge(jnp.asarray(calls[0]()))

    return Entry(part, "tokamax", calls, run_check)

"""The released models' MoE layers as values."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import MoELayers, moe_layers_from_hf

_COMMON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "mlp_hidden_act": "relu2",
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}
_NANO: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 2688,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
_WITH_MTP = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
_SUPER: dict[str, Any] = {
    **_COMMON,
    **_WITH_MTP,
    "hidden_size": 4096,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "routed_scaling_factor": 5.0,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
}
_ULTRA: dict[str, Any] = {
    **_SUPER,
    "hidden_size": 8192,
    "moe_intermediate_size": 5120,
    "moe_shared_expert_intermediate_size": 10240,
    "moe_latent_size": 2048,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    ),
}
# (moe_intermediate_size, num_experts_per_tok) of Puzzle's MoE layers, in order; the rest is Super's.
_PUZZLE_SIZES = (
    *((1280, 4), (1280, 8), (1280, 10), (1280, 8), (1280, 8), (1280, 8), (1280, 12), (1280, 8), (1280, 10), (1280, 8)),
    *((2688, 12), (1536, 14), (2688, 12), (1536, 12), (1536, 12), (2688, 12), (2688, 12), (2688, 12), (1536, 10)),
    *((2688, 12), (2688, 12), (1792, 12), (1792, 14), (1280, 10), (1280, 10), (1280, 12), (1280, 8), (1280, 12)),
    *((1280, 10), (1280, 8), (1280, 8), (1280, 10), (1280, 10), (1280, 10), (1280, 12), (1280, 12), (1280, 14)),
    *((1280, 16), (1792, 18), (2048, 18)),
)


def _puzzle() -> dict[str, Any]:
    sizes = iter(_PUZZLE_SIZES)
    blocks: list[dict[str, Any]] = []
    for kind in _SUPER["hybrid_override_pattern"]:
        blocks.append({"block_type": kind})
        if kind == "E":
            blocks[-1]["moe_intermediate_size"], blocks[-1]["num_experts_per_tok"] = next(sizes)
    return _SUPER | {"model_type": "nemotron_h_puzzle", "block_configs": blocks}


MODELS: Mapping[str, MoELayers] = MappingProxyType(
    {
        "nano": moe_layers_from_hf(_NANO),
        "lightning": moe_layers_from_hf(_NANO | _WITH_MTP),
        "super": moe_layers_from_hf(_SUPER),
        "ultra": moe_layers_from_hf(_ULTRA),
        "puzzle": moe_layers_from_hf(_puzzle()),
    }
)
"""The MoE layers of Nemotron-3 Nano 30B-A3B, Super 120B-A12B, Ultra 550B-A55B, Puzzle 75B-A9B and 3.5-Lightning."""

NANO: MoEConfig = MODELS["nano"][1]
"""Any MoE layer of Nano."""
SUPER: MoEConfig = MODELS["super"][1]
"""Any MoE layer of Super."""
ULTRA: MoEConfig = MODELS["ultra"][1]
"""Any MoE layer of Ultra."""
PUZZLE: MoELayers = MODELS["puzzle"]
"""The MoE layers of Puzzle, which differ in width and in experts per token, by number."""

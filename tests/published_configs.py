"""The published models' `config.json`, as far as the MoE layer is concerned (vendor's files, copied key by key)."""

_HYGIENE = {
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "residual_in_fp32": False,
    "n_shared_experts": 1,
    "n_group": 1,
    "n_groups": 8,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
}

MOE = {
    "nano": (1, 3, 6, 8, 10, 13, 15, 17, 20, 22, 24, 27, 29, 31, 34, 36, 38, 40, 43, 45, 47, 49, 51),
    "super": (
        *(1, 3, 5, 8, 10, 12, 14, 17, 19, 21, 23, 26, 28, 30, 32, 34, 37, 39, 41, 43, 45, 48, 50, 52, 54, 56, 59, 61),
        *(63, 65, 67, 70, 72, 74, 76, 79, 81, 83, 85, 87),
    ),
    "ultra": (
        *(1, 3, 5, 8, 10, 12, 15, 17, 19, 21, 24, 26, 28, 30, 33, 35, 37, 40, 42, 44, 46, 49, 51, 53, 55, 58, 60, 62),
        *(65, 67, 69, 71, 74, 76, 78, 80, 83, 85, 87, 90, 92, 94, 96, 99, 101, 103, 105, 107),
    ),
}
MOE |= {"lightning": MOE["nano"], "puzzle": MOE["super"]}
ATTENTION = {
    "nano": (5, 12, 19, 26, 33, 42),
    "super": (7, 16, 25, 36, 47, 58, 69, 78),
    "ultra": (7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98),
}
ATTENTION |= {"lightning": ATTENTION["nano"], "puzzle": ATTENTION["super"]}
LAYERS = {"nano": 52, "lightning": 52, "super": 88, "puzzle": 88, "ultra": 108}


def words(model: str, moe: str = "moe", mamba: str = "mamba", attention: str = "attention") -> list[str]:
    """The model's layers one by one, in the vocabulary given."""
    kinds = dict.fromkeys(MOE[model], moe) | dict.fromkeys(ATTENTION[model], attention)
    return [kinds.get(layer, mamba) for layer in range(LAYERS[model])]


_NANO = _HYGIENE | {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
}
NANO = _NANO | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
LIGHTNING = _NANO | {
    "layers_block_type": words("lightning"),
    "moe_latent_size": None,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
}
_SUPER = _HYGIENE | {
    "num_hidden_layers": 88,
    "hidden_size": 4096,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
    "n_routed_experts": 512,
    "routed_scaling_factor": 5.0,
    "num_nextn_predict_layers": 1,
    "time_step_limit": [0.0, float("inf")],
}
SUPER = _SUPER | {
    "model_type": "nemotron_h",
    "moe_intermediate_size": 2688,
    "num_experts_per_tok": 22,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "mtp_hybrid_override_pattern": "*E",
}
ULTRA = _HYGIENE | {
    "model_type": "nemotron_h",
    "num_hidden_layers": 108,
    "hidden_size": 8192,
    "moe_intermediate_size": 5120,
    "moe_shared_expert_intermediate_size": 10240,
    "moe_latent_size": 2048,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "routed_scaling_factor": 5.0,
    "layers_block_type": words("ultra"),
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
    "time_step_limit": [0.0, 1e308],
}
PUZZLE_SIZES = {
    **{1: (1280, 4), 3: (1280, 8), 5: (1280, 10), 8: (1280, 8), 10: (1280, 8), 12: (1280, 8), 14: (1280, 12)},
    **{17: (1280, 8), 19: (1280, 10), 21: (1280, 8), 23: (2688, 12), 26: (1536, 14), 28: (2688, 12), 30: (1536, 12)},
    **{32: (1536, 12), 34: (2688, 12), 37: (2688, 12), 39: (2688, 12), 41: (1536, 10), 43: (2688, 12), 45: (2688, 12)},
    **{48: (1792, 12), 50: (1792, 14), 52: (1280, 10), 54: (1280, 10), 56: (1280, 12), 59: (1280, 8), 61: (1280, 12)},
    **{63: (1280, 10), 65: (1280, 8), 67: (1280, 8), 70: (1280, 10), 72: (1280, 10), 74: (1280, 10), 76: (1280, 12)},
    **{79: (1280, 12), 81: (1280, 14), 83: (1280, 16), 85: (1792, 18), 87: (2048, 18)},
}


def _puzzle_block(inner: int, top_k: int) -> dict:
    return {
        "block_type": "moe",
        "moe_intermediate_size": inner,
        "n_routed_experts": 512,
        "num_experts_per_tok": top_k,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
    }


PUZZLE = _SUPER | {
    "model_type": "nemotron_h_puzzle",
    "block_configs": [
        _puzzle_block(*PUZZLE_SIZES[layer]) if kind == "moe" else {"block_type": kind}
        for layer, kind in enumerate(words("puzzle"))
    ],
    "mtp_block_configs": [{"block_type": "attention"}, _puzzle_block(2688, 22)],
}
OMNI = {"model_type": "nemotron_omni", "vision_config": {"hidden_size": 1280}, "llm_config": NANO}

CONFIGS = {"nano": NANO, "lightning": LIGHTNING, "super": SUPER, "ultra": ULTRA, "puzzle": PUZZLE}

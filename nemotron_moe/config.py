"""The static description of one Mixture-of-Experts layer."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

_TINY, _HUGE = 2.0**-126, 2.0**127  # Smaller numbers count as 0 on most hardware.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and routing rules of one Nemotron MoE layer; names are the checkpoint's.

    Hashable and equal by value, so it can be a static argument of `jax.jit`. It holds no dtype, mesh or kernel choice.
    `dataclasses.asdict` gives a JSON-able dict and `MoEConfig(**d)` reads it back.

    Attributes:
      hidden_size: width H of the residual stream.
      moe_intermediate_size: width I inside one routed expert.
      n_routed_experts: number of experts E.
      num_experts_per_tok: experts chosen for each token, K (1 to E).
      moe_shared_expert_intermediate_size: width S inside the shared expert, or None for a layer without one.
      moe_latent_size: width L that the routed experts read and write (LatentMoE), or None: they use H (direct MoE).
      n_group, topk_group: experts form `n_group` equal groups, of which the best `topk_group` may be chosen from.
      norm_topk_prob: divide the chosen scores by their sum.
      routed_scaling_factor: multiplies the routing weights, once.
      layer_norm_epsilon: epsilon of the RMS norm.

    Raises:
      ValueError: on a size that is not a positive integer, or sizes that contradict each other.
    """

    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type not in (int, int | None) or (value is None and field.type is not int):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"MoEConfig.{field.name} is {value!r}; wanted a positive integer.")
        if not isinstance(self.norm_topk_prob, bool):
            raise ValueError(f"MoEConfig.norm_topk_prob is {self.norm_topk_prob!r}; wanted True or False.")
        for name in ("routed_scaling_factor", "layer_norm_epsilon"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not _TINY <= value <= _HUGE:
                raise ValueError(f"MoEConfig.{name} is {value!r}; wanted a positive number that float32 holds.")
            object.__setattr__(self, name, float(value))
        experts, groups = self.n_routed_experts, self.n_group
        if self.num_experts_per_tok > experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} but there are only {experts} experts "
                "(n_routed_experts); it must be from 1 to that number."
            )
        if groups > 1 and (experts % groups or experts // groups < 2):
            raise ValueError(
                f"n_group is {groups} for {experts} experts; it must divide them into equal groups of at least 2 "
                "(a group's score is the sum of its two best)."
            )
        if self.topk_group > groups:
            raise ValueError(f"topk_group is {self.topk_group} but there are only {groups} groups (n_group).")
        if self.num_experts_per_tok > self.topk_group * (experts // groups):
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but {self.topk_group} of {groups} groups "
                f"(topk_group, n_group) hold only {self.topk_group * (experts // groups)} experts."
            )

    @property
    def expert_width(self) -> int:
        """Width that the routed experts read and write: `moe_latent_size` if set, else `hidden_size`."""
        return self.moe_latent_size or self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | os.PathLike[str], layer: int | str | None = None) -> "MoEConfig":
        """Reads a published Nemotron-H `config.json`.

        Args:
          config: the parsed file, the file's path, or its folder's path.
          layer: which layer: a number, or a name such as "mtp.layers.1". May be None if all MoE layers are alike.

        Raises:
          ValueError: if the config is not understood, the layer is not a MoE layer, or `layer` is needed and missing.
        """
        from nemotron_moe.hf_config import moe_layers_from_hf, pick_layer

        return pick_layer(moe_layers_from_hf(config), layer)

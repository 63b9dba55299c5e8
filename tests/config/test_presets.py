"""The presets are the published configs."""

import pytest
from published_configs import CONFIGS

from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import moe_layers_from_hf
from nemotron_moe.presets import MODELS, NANO, PUZZLE, SUPER, ULTRA


@pytest.mark.quick
@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_is_what_the_published_config_gives(name):
    published = moe_layers_from_hf(CONFIGS[name])
    assert MODELS[name] == published
    assert list(MODELS[name]) == list(published)


def test_every_preset_has_a_published_config():
    assert set(MODELS) == set(CONFIGS)


def test_named_values_are_the_models_layers():
    assert set(MODELS["nano"].values()) == set(MODELS["lightning"].values()) == {NANO}
    assert set(MODELS["super"].values()) == {SUPER}
    assert set(MODELS["ultra"].values()) == {ULTRA}
    assert MODELS["puzzle"] == PUZZLE
    assert all(isinstance(config, MoEConfig) for config in PUZZLE.values())


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        MODELS["nano"] = PUZZLE
    with pytest.raises(TypeError):
        PUZZLE[1] = NANO


@pytest.mark.parametrize("width, layers", [(1280, 25), (2688, 7), (1536, 4), (1792, 3), (2048, 1)])
def test_puzzle_has_its_published_number_of_layers_of_each_width_C3(width, layers):
    own = [config for layer, config in PUZZLE.items() if layer != "mtp.layers.1"]
    assert sum(config.moe_intermediate_size == width for config in own) == layers

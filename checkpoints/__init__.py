"""Published checkpoints: safetensors files to the layer's weights."""

from checkpoints.errors import CheckpointError as CheckpointError
from checkpoints.find import FieldFormat as FieldFormat
from checkpoints.load import layer_files as layer_files
from checkpoints.load import layer_formats as layer_formats
from checkpoints.load import list_moe_layers as list_moe_layers
from checkpoints.load import load_layer as load_layer
from checkpoints.load import load_layers as load_layers

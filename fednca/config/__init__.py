"""Settings: one tree for TOML files, command-line flags and Python."""

from fednca.config.load import load_config, preset_names, read_toml, source_name
from fednca.config.options import Options, validate
from fednca.config.tree import (
    AugmentConfig,
    CalibrateConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    MethodConfig,
    ModelConfig,
    PartitionConfig,
    TrainConfig,
    build_config,
    leaves,
)

__all__ = [
    "AugmentConfig", "CalibrateConfig", "Config", "DataConfig", "EvaluateConfig", "MethodConfig", "ModelConfig",
    "Options", "PartitionConfig", "TrainConfig", "build_config", "leaves", "load_config", "preset_names", "read_toml",
    "source_name", "validate",
]  # fmt: skip

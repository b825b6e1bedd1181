"""`ds_runtime_kit.loaders.checkpoints`."""

from ds_runtime_kit.loaders.checkpoints import *

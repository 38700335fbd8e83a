"""LightningModules without Lightning's Trainer (`ModelSpec.from_lightning`). No module here imports Lightning."""

"""Strategies: how the ranks share a step. A strategy is a function `parallelize(spec, world, config) -> Trainable`."""
